"""Whether a publication can be loaded, found out before the engine is touched.

A checkpoint with a wrong shape kills a running SGLang server, a missing tensor silently keeps its old values: both
are refused here. Reads safetensors headers only (8 bytes of length, then JSON) and the bytes for their checksums.
"""

import json
from pathlib import Path
from typing import Any

from penstock.checksum import file_crc32
from penstock.errors import PublishError
from penstock.messages import Publication

#: Name -> (safetensors dtype, shape).
Tensors = dict[str, tuple[str, tuple[int, ...]]]

_MAX_HEADER_BYTES = 100 * 1024 * 1024
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32"}
#: Loading casts between these.
_PLAIN_FLOATS = {"F32", "F16", "BF16", "F64"}


def read_header(path: Path) -> Tensors:
    """Tensors of one safetensors file.

    Raises:
        PublishError: it is no safetensors file, or shorter or longer than its header says.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {name: (str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise PublishError(f"{path} is not a whole safetensors file ({exc}): publish it again.") from exc
    if 8 + length + end != size:
        raise PublishError(f"{path} has {size} bytes where its header says {8 + length + end}: publish it again.")
    return tensors


def read_folder(folder: Path) -> Tensors:
    """Tensors of all safetensors files of a folder; empty where there is none."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(read_header(path))
    return tensors


def has_tied_embeddings(folder: Path) -> bool:
    """Whether the model in ``folder`` uses its input embeddings as output embeddings."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("tie_word_embeddings", False))


def verify_publication(publication: Publication, reference: Tensors, *, tied: bool = False) -> None:
    """Raise PublishError unless the publication is whole and fits the model. Blocks while it reads the files.

    Args:
        reference: tensors of the model that the engine serves; empty: not known, only the publication's own claims
            are checked.
        tied: output embeddings are the input embeddings, so ``lm_head.weight`` may be there or not.
    """
    what = f"publication {publication.version} of {publication.model!r}"
    if publication.transport != "disk":
        raise PublishError(f"{what} is by {publication.transport!r}: this worker loads from disk; publish to a folder.")
    folder = Path(publication.path)
    if not folder.is_dir():
        raise PublishError(
            f"{what}: there is no folder {publication.path} on this machine; publish to one that trainer and workers "
            "share, and keep it while it is the newest."
        )
    _check_files(what, folder, publication.checksums)
    tensors = read_folder(folder)
    if not tensors:
        raise PublishError(f"{what}: {folder} holds no safetensors file.")
    announced = {name: (_dtype(value[0]), tuple(value[1])) for name, value in publication.tensors.items()}
    ignored = {"lm_head.weight"} if tied else set()
    if announced:
        _compare(what, "what was announced", tensors, announced, ignored)
    if reference:
        _compare(what, "the model that is served", tensors, reference, ignored, cast=True)


def _dtype(name: Any) -> str:
    """Safetensors name of a dtype given in either notation."""
    plain = str(name).removeprefix("torch.")
    return _DTYPES.get(plain, plain)


def _check_files(what: str, folder: Path, checksums: dict[str, int]) -> None:
    for name, checksum in checksums.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise PublishError(f"{what}: file {name!r} is not in {folder}; publish it again.")
        if file_crc32(path) != checksum:
            raise PublishError(f"{what}: {path} is not the file that was announced (CRC-32 differs); publish it again.")
    # An engine loads every safetensors file of the folder, announced or not.
    strangers = {path.name for path in folder.glob("*.safetensors")} - checksums.keys()
    if checksums and strangers:
        raise PublishError(
            f"{what}: {folder} also holds {sorted(strangers)}, not announced; publish to a clean folder."
        )


def _compare(what: str, other: str, found: Tensors, wanted: Tensors, ignored: set[str], *, cast: bool = False) -> None:
    if missing := wanted.keys() - found.keys() - ignored:
        raise PublishError(f"{what} lacks {len(missing)} tensors of {other}, such as {min(missing)!r}.")
    if extra := found.keys() - wanted.keys() - ignored:
        raise PublishError(f"{what} has {len(extra)} tensors that {other} has not, such as {min(extra)!r}.")
    for name in wanted.keys() & found.keys():
        (dtype, shape), (other_dtype, other_shape) = found[name], wanted[name]
        if shape != other_shape:
            raise PublishError(f"{what}: {name} has shape {list(shape)}, {other} has {list(other_shape)}.")
        if dtype != other_dtype and not (cast and {dtype, other_dtype} <= _PLAIN_FLOATS):
            raise PublishError(f"{what}: {name} is {dtype}, {other} has {other_dtype}.")
