"""Process a job's images with the model's image processor, once for all samples of the job.

    bytes ─> image processor of model.path ─> inputs of the model: side arrays that the group shares
                                          └─> tokens of each image: the stored prompt, never tokenized again

The engine receives the images themselves and expands their placeholders; its token counts are compared with ours.
"""

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.model.folder import read_config
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.payloads import sides
from penstock.payloads.sides import Packed
from penstock.protocol.images import check_images, decoded
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.system.extras import check_installed

#: Jobs whose images are read at a time.
_THREADS = 2
_MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


@dataclass(frozen=True, slots=True)
class Images:
    """Hold the images of a prompt as they are sent to an engine, which expands each placeholder itself."""

    #: data: URIs, in the order of their placeholders.
    uris: list[str]
    #: (index of the first token in the stored sequence, number of tokens) of each image, ascending.
    places: list[tuple[int, int]]

    def folded(self, tokens: Sequence[int]) -> list[int]:
        """Return the stored sequence with one placeholder token per image, which the engine expands."""
        out: list[int] = []
        end = 0
        for start, count in self.places:
            out += tokens[end : start + 1]
            end = start + count
        return out + list(tokens[end:])


@dataclass(slots=True, eq=False)
class Pictures:
    """Hold the images of one job, possibly none, for a model that reads images."""

    job: str
    #: Placeholder id of an image, and all placeholder ids (images and video).
    place_id: int | None
    place_ids: frozenset[int]
    #: Tokens of each image.
    counts: list[int]
    uris: list[str]
    #: Side arrays of the whole group, by name.
    packed: dict[str, Packed]
    #: [P] The stored prompt, and the images sent with it; see ``unfold``.
    prompt: list[int] = field(default_factory=list)
    images: Images = field(default_factory=lambda: Images([], []))

    def unfold(self, prompt: Sequence[int]) -> None:
        """Store the prompt with each placeholder token repeated once per token of its image.

        Raises:
            ConfigError: the placeholders do not match the images, or the prompt has one for a video.
        """
        places = [at for at, token in enumerate(prompt) if token == self.place_id]
        if len(places) != len(self.counts):
            raise ConfigError(
                f"job {self.job}: its prompt has {len(places)} places for {len(self.counts)} images: the chat template "
                "makes one of each part of type image; a text must not hold the token itself."
            )
        if (self.place_ids - {self.place_id}) & set(prompt):
            raise ConfigError(f"job {self.job}: its prompt has a video placeholder, and there is no video: remove it.")
        out: list[int] = []
        spans, begin = [], 0
        for at, count in zip(places, self.counts, strict=True):
            out += prompt[begin:at]
            spans.append((len(out), count))
            out += [prompt[at]] * count
            begin = at + 1
        self.images = Images(self.uris, spans)
        self.prompt = out + list(prompt[begin:])

    def are_of(self, sample: Sample) -> bool:
        """Return whether a prefix was generated from a prompt with the same placeholders."""
        return sample.tokens[: sample.prompt_length] == self.prompt

    def ended(self, sample: Sample) -> bool:
        """Return whether the last turn ended with a placeholder token; nothing can follow it."""
        return sample.tokens[-1] in self.place_ids

    def check_observation(self, tokens: Sequence[int]) -> None:
        """Raise ConfigError if an environment's observation contains a placeholder token."""
        if self.place_ids & set(tokens):
            raise ConfigError(
                f"job {self.job}: its environment gave an observation with an image's place in it, and images come "
                "with prompts alone: leave it out."
            )

    def stopping(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return sampling parameters that stop generation at a placeholder token.

        Raises:
            ConfigError: the job has images and its sampling has ``ignore_eos``.
        """
        if self.uris and sampling.get("ignore_eos"):
            raise ConfigError(
                f"job {self.job} has images, and its sampling has ignore_eos: an answer could continue behind a "
                "generated image placeholder that has no image: leave ignore_eos out."
            )
        given = sampling.get("stop_token_ids") or []
        return sampling | {"stop_token_ids": sorted({*given, *self.place_ids})}


class ImageReader:
    """Read images with the image processor in a model's folder. Raises ConfigError if that has none of a known kind."""

    def __init__(self, path: str) -> None:
        check_installed("PIL", "Images in prompts")
        check_installed("transformers", "Images in prompts")
        from transformers import AutoImageProcessor

        place = place_id_of(path)
        try:
            known: Any = AutoImageProcessor
            self._processor: Any = known.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, ImportError) as exc:
            raise ConfigError(f"model.path {path} holds no image processor that can be read: {exc}") from exc
        if place is None or not hasattr(self._processor, "merge_size"):
            raise ConfigError(
                f"model.path {path} reads no images in the way that is known here: models of the Qwen-VL kind do, "
                f"whose processor tells {IMAGE_GRID} and whose config.json names an image_token_id."
            )
        self._place_id, self._place_ids = place, place_ids_of(path)

    def read(self, job: Job) -> Pictures:
        """Decode the images of a job and compute the model's inputs. Blocks meanwhile.

        Raises:
            ConfigError: an image is invalid or too large.
        """
        check_images(job.images, f"job {job.id}")
        images = [decoded(data, f"job {job.id}, image {number}") for number, data in enumerate(job.images, 1)]
        try:
            found = self._processor(images=images, return_tensors="np")
        except ValueError as exc:
            raise ConfigError(f"job {job.id}: the image processor refuses its images ({exc}).") from exc
        grid = np.asarray(found[IMAGE_GRID], np.int64)
        arrays = {PIXEL_VALUES: np.asarray(found[PIXEL_VALUES], np.float32), IMAGE_GRID: grid}
        counts = grid.prod(axis=1) // int(self._processor.merge_size) ** 2
        packed = {name: sides.packed(name, array, f"{job.id}/0") for name, array in arrays.items()}
        uris = [_uri(data) for data in job.images]
        return Pictures(job.id, self._place_id, self._place_ids, counts.tolist(), uris, packed)


@cache
def place_ids_of(path: str) -> frozenset[int]:
    """Return the placeholder ids (image, video) of the model in a folder; empty for a text model."""
    config = read_config(path)
    named = (config.get(name) for name in ("image_token_id", "video_token_id"))
    return frozenset(one for one in named if type(one) is int)


def place_id_of(path: str) -> int | None:
    """Return the placeholder id of an image; None for a model without one."""
    found = read_config(path).get("image_token_id")
    return found if type(found) is int else None


def no_pictures(job: Job, path: str) -> Pictures | None:
    """Return Pictures of a job without images, which still reject placeholder tokens; None for a text model."""
    places = place_ids_of(path)
    return Pictures(job.id, place_id_of(path), places, [], [], {}) if places else None


@cache
def image_reader(path: str) -> ImageReader:
    """Return the image reader of a model's folder. The first call blocks for seconds."""
    return ImageReader(path)


@cache
def reading_threads() -> ThreadPoolExecutor:
    """Return the threads that read images: few, as all pixels of a job are in memory meanwhile."""
    return ThreadPoolExecutor(_THREADS, "images")


def _uri(data: bytes) -> str:
    kind = "PNG" if data.startswith(b"\x89PNG") else "JPEG" if data.startswith(b"\xff\xd8") else "WEBP"
    return f"data:{_MIME[kind]};base64,{base64.b64encode(data).decode()}"
