"""Fingerprint of the data: whether the positions of a run still refer to the same jobs as when it began."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from penstock.producer.dataset import Dataset
from penstock.producer.mixture import Mixture
from penstock.producer.weighted import Weighted

#: Prefix of fingerprints of content; the first ones were of rendered prompts, without a prefix.
_OF_CONTENT = "2:"
#: Keys of a dataset that affect its prompts, or their positions, besides those that every dataset has.
_SHAPING = (
    "chat_template_kwargs",
    "image_key",
    "shuffle_window",
    "source_args",
    "split",
    "streaming",
    "system_prompt",
    "tools_key",
    "weight",
)


def fingerprint(source: Mixture, held_out: Sequence[Dataset] = ()) -> str:
    """Compute a fingerprint that changes whenever a position would refer to another job, in training or evaluation.

    It covers the bytes of the sources, and the keys that affect prompts; no prompt is rendered.
    """
    held = [_of(dataset) for dataset in held_out]
    trained = [_of(dataset) for dataset in source.datasets]
    for dataset, of in zip(source.datasets, trained, strict=True):
        if source.shuffles(dataset) != source.shuffle:
            # Only added if the orders differ, so that fingerprints of older runs stay valid.
            of.append("in its own order")
    shape = [source.seed, source.shuffle, trained, held]
    # YAML has dates, JSON does not.
    text = json.dumps(shape, sort_keys=True, default=str)
    return _OF_CONTENT + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _of(dataset: Dataset) -> list[Any]:
    config = dataset.config
    keys = [config.name, config.input_key, config.answer_key, config.apply_chat_template]
    template = dataset.template.digest if dataset.template is not None and config.apply_chat_template else None
    # Only given keys: a new key of a release must not change runs that do not use it.
    given = {key: value for key in _SHAPING if (value := getattr(config, key))}
    return [*keys, template, dataset.first, dataset.last, dataset.rows.digest(), given]


def is_of_content(found: str) -> bool:
    """Return whether a fingerprint is one of :func:`fingerprint`, not of :func:`fingerprint_of_prompts`."""
    return found.startswith(_OF_CONTENT)


def fingerprint_of_prompts(source: Mixture, held_out: Sequence[Dataset] = ()) -> str:
    """Compute the fingerprint of runs begun when every prompt was rendered at the start. Blocks for rendering each.

    Raises:
        BadLine: a row has no prompt; such runs have none.
    """
    digest = hashlib.blake2b(digest_size=12)
    if isinstance(source, Weighted):
        digest.update(b"weights")  # such runs have none
    digest.update(json.dumps([source.seed, source.shuffle, len(source.datasets)]).encode())
    for dataset in (*source.datasets, *held_out):
        digest.update(f"{dataset.config.name}\0{len(dataset)}\0".encode())
        for prompt in dataset:
            digest.update(b"%d\0" % prompt.index + prompt.digest)
            if prompt.answers:
                digest.update(json.dumps(prompt.answers).encode())
    return digest.hexdigest()
