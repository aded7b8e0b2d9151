"""Ids at the Hugging Face Hub, such as ``Qwen/Qwen2.5-0.5B-Instruct``, in place of paths. A local path wins."""

import re
from pathlib import Path

from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.text import format_exc

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: Files of a model that are downloaded: configuration, tokenizer and weights, but no code and no other formats.
_PATTERNS = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


def is_hub_id(text: str, folder: Path) -> bool:
    """Return whether ``text`` is an id: OWNER/NAME, and ``folder`` has nothing called OWNER."""
    return _ID.fullmatch(text) is not None and not Path(folder, text.partition("/")[0]).exists()


def fetch_model(name: str) -> str:
    """Return the folder of a model in the Hub's cache. Blocks and raises as ``_fetch``."""
    return _fetch(name, "model", f"model.path {name}", _PATTERNS)


def fetch_dataset(name: str, what: str) -> str:
    """Return the folder of a dataset in the Hub's cache. Blocks and raises as ``_fetch``.

    Args:
        what: the dataset, at the beginning of the error.
    """
    return _fetch(name, "dataset", what, None)


def _fetch(name: str, kind: str, what: str, patterns: list[str] | None) -> str:
    """Download what the cache lacks. Blocks.

    Raises:
        ConfigError: the Hub does not have it or does not answer, and the cache does not have it either.
    """
    check_installed("huggingface_hub", f"{what}, an id at the Hugging Face Hub,")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, repo_type=kind, allow_patterns=patterns)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{what}: there is no folder {name}, and the Hugging Face Hub does not give a {kind} of this id "
            f"({format_exc(exc)}): correct it, or download the {kind} and name its folder."
        ) from exc
