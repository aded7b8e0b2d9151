"""Check whether a publication can be loaded, before the engine is touched.

A checkpoint with a wrong shape kills a running SGLang server, a missing tensor silently keeps its old values: both
are refused here. Reads safetensors headers only; the bytes for their checksums are read by ``file_hashes.py``.
"""

import operator
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.text import safe_repr
from penstock.weights.file_errors import is_folder, shown_path
from penstock.weights.index import read_index
from penstock.weights.safetensors_files import Tensors, as_safetensors, compare_layouts, header_rooms, read_folder
from penstock.workers.weights.file_hashes import differing


def verify_publication(publication: Publication, reference: Tensors, *, tied: bool = False, files: bool = True) -> None:
    """Raise PublishError unless the publication is complete and fits the model. Blocks while it reads the files.

    Args:
        reference: tensors of the model that the engine serves; empty: unknown, only the publication's own claims are
            checked.
        tied: output embeddings are the input embeddings, so ``lm_head.weight`` is optional.
        files: read the weights' files and compare their checksums; else only the index, for weights that are sent.
    """
    what = f"publication {publication.version} of {publication.model!r}"
    folder = Path(publication.path)
    if not is_folder(folder):
        raise PublishError(
            f"{what}: there is no folder {shown_path(folder)} on this machine; publish to one that trainer and workers "
            "share, and keep it while it is the newest."
        )
    try:
        _verify(what, publication, folder, reference, {"lm_head.weight"} if tied else set(), files=files)
    except OSError as exc:
        raise PublishError(f"{what} cannot be read ({exc}): publish to a folder that workers may read.") from exc


def _verify(
    what: str, publication: Publication, folder: Path, reference: Tensors, ignored: set[str], *, files: bool
) -> None:
    announced, checksums, rooms = _announced(publication, folder)
    if announced and reference:
        compare_layouts(what, "the model that is served", announced, reference, ignored, cast=True)
    if not files:
        return
    _check_files(what, folder, checksums, publication.index)
    tensors = read_folder(folder, rooms)
    if not tensors:
        raise PublishError(f"{what}: {folder} holds no safetensors file.")
    if announced:
        compare_layouts(what, "what was announced", tensors, announced, ignored)
    if reference:
        compare_layouts(what, "the model that is served", tensors, reference, ignored, cast=True)


def _announced(publication: Publication, folder: Path) -> tuple[Tensors, dict[str, int], dict[str, int] | None]:
    """Return the announced tensors, the files' checksums, and the most bytes of their headers (None: unlimited)."""
    if not publication.index:
        return _tensors_of(publication), publication.checksums, None
    index = read_index(folder, publication.index)
    entries = index.entries()
    tensors = {entry.name: (as_safetensors(entry.dtype), entry.shape) for entry in entries}
    return tensors, index.files, header_rooms(entries)


def _tensors_of(publication: Publication) -> Tensors:
    """Return the tensors that a publication without an index names itself."""
    try:
        return {
            _text(name): (as_safetensors(_text(dtype)), tuple(map(operator.index, shape)))
            for name, (dtype, shape) in publication.tensors.items()
        }
    except (TypeError, ValueError) as exc:
        raise PublishError(
            f"publication {publication.version} names what is no tensor ({exc}): publish again."
        ) from exc


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{safe_repr(value)} is no text")
    return value


def _check_files(what: str, folder: Path, checksums: dict[str, int], digest: str) -> None:
    for name in checksums:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise PublishError(f"{what}: file {safe_repr(name)} is not in {folder}; publish it again.")
    for name in differing(folder, checksums, digest):
        raise PublishError(
            f"{what}: {folder / name} is not the file that was announced (its checksum differs); publish it again."
        )
    # An engine loads every safetensors file of the folder, announced or not.
    strangers = {path.name for path in folder.glob("*.safetensors")} - checksums.keys()
    if checksums and strangers:
        raise PublishError(
            f"{what}: {folder} also holds {sorted(strangers)}, not announced; publish to a clean folder."
        )
