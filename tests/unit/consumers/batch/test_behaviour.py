"""Temperature and kind of the logprobs, from the sample's record to every trainer (T6)."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock import payloads
from penstock.buffer.group import Group
from penstock.buffer.manifest import Ages, rows_of
from penstock.config import Config, TrainerConfig
from penstock.config.sampling import temperature_of
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.adapters.slime import train_data
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.step import GRPO
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.staleness import Lineage
from penstock.records.job import Job
from penstock.records.manifest import Manifest
from penstock.records.sample import Sample
from penstock.workers.jobs.sampling import sampling_for
from tests.batch_factory import VOCABULARY, make_batch, make_manifest, make_samples, tiny_model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(1)


def drawn(model: torch.nn.Module, temperature: float) -> list[Sample]:
    return make_samples({4: model}, groups=2, n=3, temperature=temperature)


def with_kinds(batch: Batch, kinds: dict[int, str], **changes: Any) -> Batch:
    """The same batch with other kinds, and temperatures, in the rows of its manifest."""
    rows = batch.all_rows
    for index, kind in kinds.items():
        rows[index].logprob_kind = kind
        for name, value in changes.items():
            setattr(rows[index], name, value)
    return Batch(make_manifest(rows), digest="d", payloads=batch.payloads)


USES: dict[str, Callable[[Batch], object]] = {
    "arrays": lambda batch: batch.arrays(),
    "padded": lambda batch: batch.padded(),
    "packed": lambda batch: batch.packed(64),
    "micro_batches": lambda batch: list(batch.micro_batches(64)),
    "minibatches": lambda batch: list(batch.minibatches(1)),
    "slime": train_data,
}


def test_T6_the_kind_travels_from_the_record_to_the_row_and_over_the_wire() -> None:
    [sample] = make_samples({4: tiny_model(1)}, groups=1, n=1)
    _, (meta,) = payloads.pack([sample], token="t", server="s", temperature=0.7, logprob_kind="original")
    ages = Ages(Lineage(()), 4, counts=True, floor=-1)
    (row,) = rows_of(Group("toy/0/0", "train", 1, 1, 1, oldest=4), meta, ages)
    assert (row.temperature, row.logprob_kind) == (0.7, "original")
    again = Manifest.from_bytes(make_manifest([row]).to_bytes())
    assert again.rows[0].logprob_kind == "original"


@pytest.mark.parametrize("use", USES)
def test_T6_logprobs_from_before_a_temperature_that_is_not_1_are_refused(model: torch.nn.Module, use: str) -> None:
    batch = with_kinds(make_batch(drawn(model, 0.7)), {1: "original"})
    with pytest.raises(ConfigError, match=r"toy/0/0/1 was sampled at temperature 0\.7, .*original.*temperature 1"):
        USES[use](batch)


@pytest.mark.parametrize("use", USES)
def test_T6_at_temperature_1_both_kinds_are_one(model: torch.nn.Module, use: str) -> None:
    USES[use](with_kinds(make_batch(drawn(model, 1.0)), {1: "original"}))


def test_T6_every_rank_refuses_though_only_one_has_the_sample(model: torch.nn.Module) -> None:
    batch = with_kinds(make_batch(drawn(model, 0.7)), {0: "original"})
    for rank in range(3):
        with pytest.raises(ConfigError, match="original"):
            batch.share(rank, 3).arrays()


def test_T6_the_reference_trainer_makes_no_step_of_them(model: torch.nn.Module) -> None:
    learner = GRPO(model, torch.optim.SGD(model.parameters(), lr=1.0), TrainerConfig())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match="original"):
        learner.step(with_kinds(make_batch(drawn(model, 0.7)), {1: "original"}))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_T6_what_bears_no_loss_and_what_nobody_trains_may_be_of_any_kind(model: torch.nn.Module) -> None:
    samples = drawn(model, 0.7)
    samples[1].loss_mask = [0] * len(samples[1].tokens)
    with_kinds(make_batch(samples), {1: "original"}).arrays()
    batch = with_kinds(make_batch(drawn(model, 0.7)), {1: "original"})
    assert "logprobs" not in batch.arrays(["tokens", "loss_mask"]), "tokens alone may be read"
    batch.trained = False
    assert batch.share(0, 1).arrays()["tokens"].max() < VOCABULARY


def test_T6_a_kind_that_is_not_known_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ProtocolError, match=r"toy/0/0/2 have unknown kind 'raw'"):
        with_kinds(make_batch(drawn(model, 1.0)), {2: "raw"})


# --- one number ---------------------------------------------------------------------------------------------------


def test_T6_a_batch_tells_its_temperature(model: torch.nn.Module) -> None:
    assert make_batch(drawn(model, 0.7)).temperature == pytest.approx(0.7)
    assert train_data(make_batch(drawn(model, 0.7)))["temperatures"] == pytest.approx([0.7] * 6)


def test_T6_mixed_temperatures_are_refused_where_one_number_is_expected(model: torch.nn.Module) -> None:
    batch = with_kinds(make_batch(drawn(model, 0.7)), {4: "scaled"}, temperature=1.0)
    assert batch.arrays()["temperatures"].tolist() == pytest.approx([0.7] * 4 + [1.0, 0.7]), "one for each sample"
    with pytest.raises(ConfigError, match=r"toy/0/0/0 was sampled at temperature 0\.7 and toy/0/1/1 at 1,"):
        train_data(batch)
    with pytest.raises(ConfigError, match="divides all logits by one"):
        _ = batch.temperature


def test_T6_a_batch_of_another_temperature_than_the_trainers_is_refused(model: torch.nn.Module) -> None:
    train_data(make_batch(drawn(model, 0.7)), temperature=0.7)
    with pytest.raises(
        ConfigError, match=r"sampled at temperature 0\.7, but the trainer's --rollout-temperature is 1, which"
    ):
        train_data(make_batch(drawn(model, 0.7)), temperature=1.0)


def config_of(tmp_path: Path, *, sampling: dict[str, Any], first: dict[str, Any], **engine: Any) -> Config:
    train = [{"path": "a.jsonl", "name": "a", "sampling": first}, {"path": "b.jsonl", "name": "b"}]
    return Config.model_validate(
        {
            "run": "t", "directory": str(tmp_path), "data": {"train": train}, "model": {"path": "m"},
            "rollout": {"sampling": sampling}, "engine": engine, "reward": {"function": "exact_match"},
        }
    )  # fmt: skip


def test_T6_the_runs_temperature_is_that_of_all_its_datasets(tmp_path: Path) -> None:
    assert behaviour.run_temperature(config_of(tmp_path, sampling={}, first={})) == 1.0
    assert behaviour.run_temperature(config_of(tmp_path, sampling={"temperature": 0.7}, first={})) == 0.7
    mixed = config_of(tmp_path, sampling={"temperature": 0.7}, first={"temperature": 0.9})
    with pytest.raises(ConfigError, match=r"a at 0\.9, b at 0\.7"):
        behaviour.run_temperature(mixed)


def test_T6_a_temperature_that_is_null_is_left_out_everywhere(tmp_path: Path) -> None:
    null: dict[str, Any] = {"temperature": None}
    config = config_of(tmp_path, sampling={"temperature": 0.7}, first=null, logprob_kind="original")
    with pytest.raises(ConfigError, match=r"dataset b is sampled at temperature 0\.7"):
        behaviour.check_config(config)
    behaviour.check_config(config_of(tmp_path, sampling=null, first={}, logprob_kind="original"))
    assert behaviour.run_temperature(config_of(tmp_path, sampling=null, first={"temperature": 1.0})) == 1.0
    assert Requests.temperature(cast(Requests, SimpleNamespace(config=config)), null) == 1.0
    drawn = sampling_for(Job("a/0/0", 1, prompt="p", sampling=null), config.rollout)
    assert (drawn["temperature"], temperature_of(null), temperature_of({"temperature": 0})) == (1.0, 1.0, 0.0)
    sample = Sample(Job("a/0/0", 1, prompt="p", sampling=null), 0, reward=1.0, status="completed")
    sample.append([1])
    sample.append([2], version=1, logprobs=[-0.5])
    sample.prompt_length = 1
    assert payloads.pack([sample], token="t", server="s")[1][0].temperature == 1.0


def test_T6_a_run_that_could_not_be_trained_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    behaviour.check_config(config_of(tmp_path, sampling={}, first={}, logprob_kind="original"))
    behaviour.check_config(config_of(tmp_path, sampling={"temperature": 0.7}, first={}, logprob_kind="scaled"))
    for engine in ({"logprob_kind": "original"}, {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "true"}}):
        config = config_of(tmp_path, sampling={}, first={"temperature": 0.7}, **engine)
        with pytest.raises(ConfigError, match=r"kind original, but dataset a is sampled at .* 0\.7"):
            behaviour.check_config(config)
