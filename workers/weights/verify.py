"""Check whether a publication can be loaded, before the engine is touched.

A checkpoint with a wrong shape kills a running SGLang server, a missing tensor silently keeps its old values: both
are refused here. Reads safetensors headers only; the bytes for their checksums are read by ``file_hashes.py``.
"""

import os
from pathlib import Path

from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.text import utf8_safe
from penstock.weights.index import read_index
from penstock.weights.safetensors_files import Tensors, as_safetensors, compare_layouts, header_rooms, read_folder
from penstock.workers.weights.file_hashes import differing

#: Most characters of a path that are shown.
MAX_PATH = 300


def verify_publication(publication: Publication, reference: Tensors, *, tied: bool = False, files: bool = True) -> None:
    """Raise PublishError unless the publication is complete and fits the model. Blocks while it reads the files.

    Args:
        reference: tensors of the model that the engine serves; empty: unknown, only the index is checked.
        tied: output embeddings are the input embeddings, so ``lm_head.weight`` is optional.
        files: read the weights' files and compare their checksums; else only the index, for weights that are sent.
    """
    what = f"publication {publication.version} of {publication.model!r}"
    folder, ignored = Path(publication.path), {"lm_head.weight"} if tied else set()
    if not os.path.isdir(folder):
        raise PublishError(
            f"{what}: there is no folder {utf8_safe(str(folder), MAX_PATH)} on this machine that workers may read; "
            "publish to one that they share with the trainer, and keep it while it is the newest."
        )
    index = read_index(folder, publication.index)
    entries = index.entries()
    announced = {entry.name: (as_safetensors(entry.dtype), entry.shape) for entry in entries}
    if reference:
        compare_layouts(what, "the model that is served", announced, reference, ignored, cast=True)
    if not files:
        return
    try:
        if wrong := differing(folder, index.files, publication.index):
            raise PublishError(
                f"{what}: {folder / wrong[0]} is not the file that was announced (its checksum differs); publish it "
                "again."
            )
        # An engine loads every safetensors file of the folder, announced or not.
        if strangers := {path.name for path in folder.glob("*.safetensors")} - index.files.keys():
            raise PublishError(
                f"{what}: {folder} also holds {sorted(strangers)}, not announced; publish to a clean folder."
            )
        tensors = read_folder(folder, header_rooms(entries))
    except OSError as exc:
        raise PublishError(f"{what} cannot be read ({exc}): publish to a folder that workers may read.") from exc
    compare_layouts(what, "what was announced", tensors, announced, set())
