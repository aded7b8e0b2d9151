"""A key that another one leaves without any effect is refused in one sentence, which names both."""

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import Config

TEACHER = {"name": "t", "url": "http://127.0.0.1:1", "path": "p"}
BASE: dict[str, Any] = {
    "run": "r",
    "model": {"path": "m"},
    "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
    "rollout": {"n": 4, "teacher": TEACHER},
}
Changes = dict[str, dict[str, Any]]


def made(changes: Changes) -> Config:
    values = copy.deepcopy(BASE)
    for section, of in changes.items():
        values[section] = values.get(section, {}) | of
    return Config.model_validate(values)


def dataset(**values: Any) -> Changes:
    return {"data": {"train": [{"name": "d", "path": "d.jsonl", **values}]}}


def curriculum(**values: Any) -> Changes:
    return dataset(curriculum=values)


STEPS: Changes = {"rollout": {"sides": ["step_rewards"]}}
ROUTED: Changes = {"rollout": {"sides": ["routed_experts"]}}
HELD_OUT: dict[str, Any] = BASE["data"] | {"eval": [{"name": "e", "path": "e.jsonl"}]}
#: What is refused, what the sentence says, and the same with the remedy that it names.
IDLE: list[tuple[Changes, str, Changes]] = [
    (
        {"trainer": {"distill": {}}, "hooks": {"rewards": "m:f"}},
        r"hooks\.rewards computes advantages from rewards, but trainer\.distill alone ignores rewards",
        {"trainer": {"distill": {"with_rewards": True}}, "hooks": {"rewards": "m:f"}},
    ),
    (
        {"trainer": {"distill": {}, "filter": {"functions": ["nonzero_std"]}}},
        r"trainer\.filter\.functions has nonzero_std, .* but trainer\.distill alone ignores rewards",
        {"trainer": {"distill": {"with_rewards": True}, "filter": {"functions": ["nonzero_std"]}}},
    ),
    (
        {"trainer": {"distill": {}, "advantage": "rloo"}},
        r"advantage rloo is computed from rewards, but distill alone ignores rewards",
        {"trainer": {"distill": {"with_rewards": True}, "advantage": "rloo"}},
    ),
    (
        {"trainer": {"process": {}}},
        r"trainer\.process requires step rewards: add step_rewards to rollout\.sides",
        {"trainer": {"process": {}}} | STEPS,
    ),
    (
        {"trainer": {"process": {}}, "hooks": {"rewards": "m:f"}} | STEPS,
        r"hooks\.rewards computes advantages from rewards, but trainer\.process alone ignores rewards",
        {"trainer": {"process": {"with_rewards": True}}, "hooks": {"rewards": "m:f"}} | STEPS,
    ),
    (
        {"trainer": {"process": {}, "distill": {}}} | STEPS,
        r"process learns from rewards of steps, and distill alone from none: remove process, or set distill",
        {"trainer": {"process": {}, "distill": {"with_rewards": True}}} | STEPS,
    ),
    (
        {"trainer": {"advantage": "rloo"}, "hooks": {"rewards": "m:f"}},
        r"hooks\.rewards computes the advantages instead of trainer\.advantage rloo",
        {"hooks": {"rewards": "m:f"}},
    ),
    (
        {"trainer": {"transport": "delta"}, "serving": {"enabled": True}},
        r"with trainer\.transport delta workers read trainer\.delta_store: set it to a folder or URL",
        {"trainer": {"transport": "delta"}, "worker": {"copies_bytes": 10**9}},
    ),
    (
        {"worker": {"copies_dir": "/copies"}},
        r"worker\.copies_dir requires trainer\.transport delta, but trainer\.transport is disk",
        {"serving": {"enabled": True, "folder": "/copies"}},
    ),
    (
        {"trainer": {"transfer_address": "10.0.0.1"}},
        r"transfer_address requires transport nccl or gloo, but transport is disk",
        {"trainer": {"transfer_address": "10.0.0.1", "transport": "gloo"}},
    ),
    (
        {"hooks": {"eval_log": "m:f"}},
        r"hooks\.eval_log is called after evaluations, but data\.eval is empty",
        {"hooks": {"eval_log": "m:f"}, "data": HELD_OUT},
    ),
    (
        {"hooks": {"eval": "m:f"}},
        r"hooks\.eval makes samples of evaluations, but data\.eval is empty: add a dataset, or remove the hook",
        {"hooks": {"eval": "m:f"}, "data": HELD_OUT},
    ),
    (
        {"rollout": {"on_group_timeout": "drop"}},
        r"on_group_timeout drop requires a time limit",
        {"rollout": {"on_group_timeout": "drop", "group_timeout_s": 5}},
    ),
    (
        {"rollout": {"min_group": 3, "group_timeout_s": 5}},
        r"min_group 3 requires on_group_timeout: train, but on_group_timeout is wait",
        {"rollout": {"min_group": 3, "group_timeout_s": 5, "on_group_timeout": "train"}},
    ),
    (
        {"trainer": {"filter": {"keep_when_few": True}}},
        r"keep_when_few holds back what filters reject, and functions names none",
        {"trainer": {"filter": {"keep_when_few": True, "functions": ["nonzero_std"]}}},
    ),
    (
        {"trainer": {"subscription": {"priority": "length"}}},
        r"priority length requires sampler prioritized, but another sampler is set",
        {"trainer": {"subscription": {"priority": "length", "sampler": "prioritized"}}},
    ),
    (
        {"trainer": {"subscription": {"exponent": 2.0, "sampler": "fifo"}}},
        r"exponent 2 requires sampler prioritized, but another sampler is set",
        {"trainer": {"subscription": {"exponent": 2.0, "sampler": "prioritized"}}},
    ),
    (
        {"trainer": {"transport": "delta", "folder_first": False}},
        r"folder_first false has no effect with transport delta, which always writes the folder first",
        {"trainer": {"transport": "delta"}},
    ),
    (
        {"trainer": {"delta_store": "s3://b/x"}},
        r"delta_store requires transport delta, but transport is disk: set it, or remove delta_store",
        {"trainer": {"delta_store": "s3://b/x", "transport": "delta"}},
    ),
    (
        {"worker": {"checkpoint_tokens": 64}} | ROUTED,
        r"worker\.checkpoint_tokens has no effect with routed_experts in rollout\.sides",
        {"worker": {"checkpoint_tokens": 64}},
    ),
    (
        {"rollout": {"lease_tokens": 64}, "hooks": {"rollout": "m:f"}},
        r"rollout\.lease_tokens is for samples that the worker generates, but hooks\.rollout generates them: remove it",
        {"rollout": {"lease_tokens": 64}, "hooks": {"eval": "m:f"}, "data": HELD_OUT},
    ),
    (
        {"worker": {"checkpoint_tokens": 64}, "hooks": {"generate": "m:f"}},
        r"worker\.checkpoint_tokens is for samples that the worker generates, but hooks\.generate generates them",
        {"hooks": {"generate": "m:f"}},
    ),
    (
        {"serving": {"host": "0.0.0.0", "port": 8080}},
        r"serving.enabled is not set, but host, port are: set enabled",
        {"serving": {"host": "0.0.0.0", "port": 8080, "enabled": False}},
    ),
    (
        {"serving": {"port": 8080}},
        r"serving.enabled is not set, but port is: set enabled to true",
        {"serving": {"port": 8080, "enabled": True}},
    ),
    (
        {"trainer": {"serve_bytes_per_s": 10**6}},
        r"trainer\.serve_bytes_per_s limits serving over HTTP, but serving\.enabled is not set",
        {"trainer": {"serve_bytes_per_s": 10**6}, "serving": {"enabled": True}},
    ),
    (
        dataset(on_long_prompt="skip"),
        r"on_long_prompt skip goes by max_prompt_tokens, and that is not set",
        dataset(on_long_prompt="skip", max_prompt_tokens=9),
    ),
    (
        dataset(image_folder="x"),
        r"image_folder needs a chat template",
        dataset(image_folder="x", apply_chat_template=True),
    ),
    (
        curriculum(skip_above=None),
        r"skip_above and skip_below are both null, so no prompt is skipped",
        curriculum(skip_above=None, skip_below=0.0),
    ),
    (
        {"reward": {"overlong": {"factor": 2.0}}},
        r"factor says what long answers lose, and without max_tokens none loses anything",
        {"reward": {"overlong": {"factor": 2.0, "max_tokens": 9000}}},
    ),
    (
        {"redis": {"port": 7000, "url": "redis+sentinel://a:1,b:2/main"}},
        r"port 7000 is for a server that penstock starts, but url names another one: remove port or url",
        {"redis": {"port": 7000}},
    ),
    (
        {"reward": {"pool": {"memory_bytes": 2**30}}},
        r"memory_bytes requires kind rq, but kind is process: set kind to rq, or remove memory_bytes",
        {"reward": {"pool": {"memory_bytes": 2**30, "kind": "rq"}}},
    ),
    (
        curriculum(revisit=1.0),
        r"revisit 1 has every prompt come that is to be skipped",
        curriculum(revisit=0.9),
    ),
]


@pytest.mark.parametrize(("changes", "sentence", "remedy"), IDLE, ids=[sentence[:40] for _, sentence, _ in IDLE])
def test_an_idle_key_is_refused_and_its_remedy_taken(changes: Changes, sentence: str, remedy: Changes) -> None:
    with pytest.raises(ValidationError, match=sentence) as caught:
        made(changes)
    assert len(caught.value.errors()) == 1
    made(remedy)


def test_what_nobody_asked_for_is_never_refused() -> None:
    """A configuration that was written out in full is the same one."""
    for _, _, remedy in IDLE:
        config = made(remedy)
        assert Config.model_validate(config.model_dump()) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"serving": {"host": "127.0.0.1", "port": 0, "folder": None}},
        {"rollout": {"n": 1, "min_group": 2}},
        # Of who serves it and who is told where, by one file.
        {"redis": {"port": 7000, "url": "redis://:secret@127.0.0.1:7000/0"}},
        {"rollout": {"lease_tokens": None} | ROUTED["rollout"], "worker": {"checkpoint_tokens": None}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_default_that_is_spelt_out_is_no_wish(changes: Changes) -> None:
    made(changes)
