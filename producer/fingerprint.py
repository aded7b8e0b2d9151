"""What tells whether the positions of a run still mean the jobs that they meant when it began."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from penstock.producer.dataset import Dataset
from penstock.producer.mixture import Mixture
from penstock.producer.weighted import Weighted

#: Begins those of content; the first ones were of rendered prompts, and begin with no mark.
_OF_CONTENT = "2:"
#: Keys of a dataset that shape its prompts, or say which of them a position means, beside those that every one has.
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
    """Changes whenever a position would mean another job, in training or in an evaluation.

    It is of what the sources hold, as bytes, and of the keys that shape prompts; no prompt is rendered.
    """
    held = [_of(dataset) for dataset in held_out]
    trained = [_of(dataset) for dataset in source.datasets]
    for dataset, of in zip(source.datasets, trained, strict=True):
        if source.shuffles(dataset) != source.shuffle:
            # Said where sets differ alone, for the runs that began before they were told apart.
            of.append("in its own order")
    shape = [source.seed, source.shuffle, trained, held]
    # YAML knows dates, which JSON does not.
    text = json.dumps(shape, sort_keys=True, default=str)
    return _OF_CONTENT + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _of(dataset: Dataset) -> list[Any]:
    config = dataset.config
    keys = [config.name, config.input_key, config.answer_key, config.apply_chat_template]
    template = dataset.template.digest if dataset.template is not None and config.apply_chat_template else None
    # Only what is given: a key that is new in a release leaves the runs alone that do not have it.
    given = {key: value for key in _SHAPING if (value := getattr(config, key))}
    return [*keys, template, dataset.first, dataset.last, dataset.rows.digest(), given]


def is_of_content(found: str) -> bool:
    """Whether a fingerprint is one of :func:`fingerprint`, and not of :func:`fingerprint_of_prompts`."""
    return found.startswith(_OF_CONTENT)


def fingerprint_of_prompts(source: Mixture, held_out: Sequence[Dataset] = ()) -> str:
    """The one of runs that were begun when every prompt was rendered at the start. Blocks for rendering each.

    Raises:
        BadLine: a row has no prompt; such runs have none.
    """
    digest = hashlib.blake2b(digest_size=12)
    if isinstance(source, Weighted):
        digest.update(b"weights")  # which such runs have not
    digest.update(json.dumps([source.seed, source.shuffle, len(source.datasets)]).encode())
    for dataset in (*source.datasets, *held_out):
        digest.update(f"{dataset.config.name}\0{len(dataset)}\0".encode())
        for prompt in dataset:
            digest.update(b"%d\0" % prompt.index + prompt.digest)
            if prompt.answers:
                digest.update(json.dumps(prompt.answers).encode())
    return digest.hexdigest()
