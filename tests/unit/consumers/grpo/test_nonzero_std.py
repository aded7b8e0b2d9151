"""The built-in filter: which rewards count, and where there is nothing to compare."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import payloads
from penstock.buffer.filters import Filters, nonzero_std
from penstock.buffer.group import priorities
from penstock.config import Config
from penstock.config.load import load_config
from penstock.consumers.batch.advantages import Kind
from penstock.errors import ConfigError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.records.sample_meta import CompletedGroup, SampleMeta
from tests.batch_factory import make_batch


def made(k: int, reward: float, *, masked: bool = False, n: int = 4) -> Sample:
    sample = Sample(Job("d/0/0", n), k)
    sample.append([1, 2])
    sample.prompt_length = 2
    sample.append([3, 4], version=5, logprobs=[-0.5, -0.5], loss=not masked)
    sample.status, sample.finish_reason, sample.reward = "completed", "stop", reward
    return sample


def meta_of(sample: Sample) -> SampleMeta:
    _, (meta,) = payloads.pack([sample], token="t", server="s")
    return meta


def meta(k: int, reward: float, *, masked: bool = False, n: int = 4) -> SampleMeta:
    return meta_of(made(k, reward, masked=masked, n=n))


def group(*samples: SampleMeta, n: int = 4) -> CompletedGroup:
    return CompletedGroup("d/0/0", "train", n, samples)


def test_a_masked_sample_does_not_count() -> None:
    """What bears no loss moves nothing, so a group that differs in nothing else teaches nothing."""
    same = [meta(k, 1.0) for k in range(3)]
    assert nonzero_std(group(*same, meta(3, 0.0, masked=True))) == (False, "zero_std_1.0")
    assert nonzero_std(group(*same, meta(3, 0.0)))[0]
    assert nonzero_std(group(*same[:2], meta(2, 0.5), meta(3, 0.0, masked=True)))[0]
    assert nonzero_std(group(*(meta(k, float(k), masked=True) for k in range(4)))) == (False, "no_loss")


def test_a_masked_sample_does_not_count_for_the_priority_either() -> None:
    samples = [meta(0, 1.0), meta(1, 1.0), meta(2, 0.0, masked=True)]
    assert priorities(samples, ["reward_std"]) == {"reward_std": 0.0}


@pytest.mark.parametrize("reward", [0.1, 1e9 + 0.1, 1e11 + 0.3, 1e15 + 0.5])
def test_a_group_of_equal_large_rewards_has_no_deviation(reward: float) -> None:
    samples = [meta(k, reward, n=7) for k in range(7)]
    assert nonzero_std(group(*samples, n=7)) == (False, f"zero_std_{reward:.1f}")
    assert priorities(samples, ["reward_std"]) == {"reward_std": 0.0}


@pytest.mark.parametrize("reward", [1.0, 1e160, 1e308, 5e-324])
def test_rewards_of_any_finite_size_have_a_deviation(reward: float) -> None:
    samples = [meta(k, (-1) ** k * reward, n=4) for k in range(4)]
    assert priorities(samples, ["reward_std"]) == {"reward_std": pytest.approx(reward, rel=1e-12)}
    assert nonzero_std(group(*samples, n=4))[0] == (reward > 1e-6)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=2, max_size=5),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_T11_a_group_is_kept_where_a_sample_that_bears_loss_has_an_advantage(
    drawn: list[tuple[float, bool]], kind: Kind
) -> None:
    samples = [made(k, reward, masked=masked, n=len(drawn)) for k, (reward, masked) in enumerate(drawn)]
    metas = [meta_of(sample) for sample in samples]
    kept, _ = nonzero_std(group(*metas, n=len(drawn)))
    found = make_batch(samples, advantage=kind).arrays()
    assert kept == bool((abs(found["advantages"]) * found["loss_mask"] > 1e-6).any())
    assert not kept or not any(found["advantages"][k].any() for k, (_, masked) in enumerate(drawn) if masked)


def test_groups_of_one_are_not_dropped_for_ever_but_told() -> None:
    verdict = Filters().judge(["nonzero_std"], group(meta(0, 1.0, n=1), n=1))
    assert (verdict.keep, verdict.reason) == (False, "raised"), "what becomes of it is on_filter_error's to say"
    assert "nonzero_std drops every group of n = 1: leave it out, or raise n." in verdict.error
    # One that is left of a group that was closed early is compared with nobody, and dropped.
    assert nonzero_std(group(meta(0, 1.0))) == (False, "zero_std_1.0")


def config(folder: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": "t", "model": {"path": "m"}, "data": {"train": [{"path": "a.jsonl", "name": "a"}]},
        "trainer": {"filter": {"functions": ["nonzero_std"]}},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(json.dumps(values | changes))
    return load_config(path, [], {})


def test_nonzero_std_with_groups_of_one_is_refused(tmp_path: Path) -> None:
    config(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.n is 1, but trainer\.filter\.functions has nonzero_std"):
        config(tmp_path, rollout={"n": 1})
    several = {"train": [{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "b", "n": 1}]}
    with pytest.raises(ConfigError, match=r"data\.train 'b' has n 1"):
        config(tmp_path, data=several)
    config(tmp_path, rollout={"n": 1}, trainer={"filter": {"functions": []}, "advantage": "reinforce_pp_baseline"})
