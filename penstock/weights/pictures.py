"""The image processor in a model's folder, and what it makes of a job's images: once, for all its samples.

    bytes ─> image processor of model.path ─> what the model is given: side arrays that the group shares
                                          └─> tokens of each image: the stored prompt, made once, never tokenized again

The engine is sent the images themselves, and makes room for each; how many tokens it came to is held against ours.
"""

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.payloads import sides
from penstock.payloads.sides import Packed
from penstock.protocol.images import check_images, decoded
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.system.extras import check_installed
from penstock.weights.index import read_config

#: Jobs whose images are read at a time.
_THREADS = 2
_MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


@dataclass(frozen=True, slots=True)
class Images:
    """Images of a prompt as an engine is asked with them: it makes room for each by itself."""

    #: data: URIs, in the order of their places.
    uris: list[str]
    #: (index of its first token in the stored sequence, its tokens) of each, ascending.
    places: list[tuple[int, int]]

    def folded(self, tokens: Sequence[int]) -> list[int]:
        """The stored sequence with one token in the place of each image: what the engine makes the sequence of."""
        out: list[int] = []
        end = 0
        for start, count in self.places:
            out += tokens[end : start + 1]
            end = start + count
        return out + list(tokens[end:])


@dataclass(slots=True, eq=False)
class Pictures:
    """The images of one job; or that it has none, where the model sees some."""

    job: str
    #: Id that stands in the place of an image, and ids that do so of anything else.
    place_id: int | None
    place_ids: frozenset[int]
    #: Tokens of each image.
    counts: list[int]
    uris: list[str]
    #: Side arrays of the whole group, by name.
    packed: dict[str, Packed]
    #: [P] The stored prompt, and what the engine is sent with it; see ``unfold``.
    prompt: list[int] = field(default_factory=list)
    images: Images = field(default_factory=lambda: Images([], []))

    def unfold(self, prompt: Sequence[int]) -> None:
        """Make the stored prompt of one with a token in the place of each image: as often as the image has tokens.

        Raises:
            ConfigError: the prompt has not one place for each image, or the place of anything else.
        """
        places = [at for at, token in enumerate(prompt) if token == self.place_id]
        if len(places) != len(self.counts):
            raise ConfigError(
                f"job {self.job}: its prompt has {len(places)} places for {len(self.counts)} images: the chat template "
                "makes one of each part of type image; a text must not hold the token itself."
            )
        if (self.place_ids - {self.place_id}) & set(prompt):
            raise ConfigError(f"job {self.job}: its prompt has the place of a video, and there is none: take it out.")
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
        """Whether a prefix was drawn behind a prompt in which the images have the places that they have here."""
        return sample.tokens[: sample.prompt_length] == self.prompt

    def ended(self, sample: Sample) -> bool:
        """Whether the last turn ended by a token that an image's place is made of; nothing can come behind it."""
        return sample.tokens[-1] in self.place_ids

    def check_observation(self, tokens: Sequence[int]) -> None:
        """Raise ConfigError where an environment's observation has an image's place in it."""
        if self.place_ids & set(tokens):
            raise ConfigError(
                f"job {self.job}: its environment gave an observation with an image's place in it, and images come "
                "with prompts alone: leave it out."
            )

    def stopping(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Sampling under which an answer ends where it draws the place of an image.

        Raises:
            ConfigError: there are images, and an answer is to end nowhere.
        """
        if self.uris and sampling.get("ignore_eos"):
            raise ConfigError(
                f"job {self.job} has images, and its sampling has ignore_eos: an answer would go on behind the place "
                "of an image that it draws, of which there is none: leave ignore_eos out."
            )
        given = sampling.get("stop_token_ids") or []
        return sampling | {"stop_token_ids": sorted({*given, *self.place_ids})}


class ImageReader:
    """The image processor in a model's folder. Raises ConfigError where there is none that is known here."""

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
        """Decode the images of a job, and make of them what a model is given. Blocks for it.

        Raises:
            ConfigError: an image is none, or larger than one may be.
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
    """Ids that stand in the place of what is no text, of the model in a folder; empty where it reads text alone."""
    config = read_config(path)
    named = (config.get(name) for name in ("image_token_id", "video_token_id"))
    return frozenset(one for one in named if type(one) is int)


def place_id_of(path: str) -> int | None:
    """The one of an image."""
    found = read_config(path).get("image_token_id")
    return found if type(found) is int else None


def no_pictures(job: Job, path: str) -> Pictures | None:
    """That a job has no images: its prompt, and what is drawn behind it, may hold no place of one all the same, at
    which a trainer would look for it. None: the model has no such places."""
    places = place_ids_of(path)
    return Pictures(job.id, place_id_of(path), places, [], [], {}) if places else None


@cache
def image_reader(path: str) -> ImageReader:
    """The one of a model's folder, read at the first job with images. Blocks for seconds then."""
    return ImageReader(path)


@cache
def reading_threads() -> ThreadPoolExecutor:
    """Where images are read: those of few jobs at a time, whose pixels are all in memory then."""
    return ThreadPoolExecutor(_THREADS, "images")


def _uri(data: bytes) -> str:
    kind = "PNG" if data.startswith(b"\x89PNG") else "JPEG" if data.startswith(b"\xff\xd8") else "WEBP"
    return f"data:{_MIME[kind]};base64,{base64.b64encode(data).decode()}"
