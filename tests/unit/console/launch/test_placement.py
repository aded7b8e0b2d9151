"""Who gets which GPUs: the trainer first, then each engine its own; what does not fit is refused with what there is."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.load import load_config
from penstock.console.launch.placement import place
from penstock.console.launch.run_parts import as_text, parts_of
from penstock.errors import ConfigError
from penstock.metrics import gpu_load as gpus_module
from penstock.metrics.gpu_load import numbered, visible_gpus
from penstock.workers.fleet.nodes import local_nodes
from penstock.workers.fleet.plan import plan
from tests.unit.workers.fleet.test_plan import ONE

EXAMPLES = Path(__file__).parents[4] / "examples"
EIGHT = numbered(8)


def config(**sections: Any) -> Config:
    values: dict[str, Any] = {"run": "demo", "model": {"path": "m"}, "data": {"train": [{"name": "t", "path": "t"}]}}
    return Config.model_validate(values | sections)


def test_the_trainer_has_the_first_gpus_and_each_engine_its_own_behind_them() -> None:
    laid_out = place(
        config(trainer={"device": "cuda", "dp_size": 2}, engine={"args": {"tp-size": 2}}, worker={"count": 2}),
        EIGHT,
    )

    assert laid_out.trainer == ("0", "1")
    assert laid_out.workers == (("2", "3"), ("4", "5"))
    assert laid_out.free == ("6", "7")


@pytest.mark.parametrize(
    ("args", "per_engine"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tensor-parallel-size": 2, "pp-size": 2}, 4),
        ({"tp-size": 2, "dp-size": 2}, 4),
        ({"tp-size": 4, "dp-size": 2, "enable-dp-attention": True}, 4),
        ({"device": "cpu"}, 0),
        ({"device": "npu", "tp-size": 2}, 0),
    ],
)
def test_an_engine_takes_what_its_parallelism_says(args: dict[str, Any], per_engine: int) -> None:
    laid_out = place(config(engine={"args": args}, worker={"count": 1}), EIGHT)

    assert laid_out.workers == (EIGHT[:per_engine],)


def test_names_of_gpus_are_those_that_cuda_visible_devices_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a1 ,MIG-b2,-1")

    assert visible_gpus() == ("3", "GPU-a1", "MIG-b2")
    laid_out = place(config(trainer={"device": "cuda"}, worker={"count": 2}), visible_gpus())
    assert (laid_out.trainer, laid_out.workers) == (("3",), (("GPU-a1",), ("MIG-b2",)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_a_fleet_gives_away_the_gpus_that_it_may_see_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    fleet = {"models": [{"name": "policy", "server_groups": [{"num_gpus": 2}]}]}

    laid_out = plan(config(fleet=fleet), local_nodes(config(fleet=fleet)))

    assert [engine.environment["CUDA_VISIBLE_DEVICES"] for engine in laid_out.engines] == ["5", "7"]


def test_without_nvidia_smi_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(gpus_module, "_DRIVER", tmp_path)
    assert visible_gpus() == ()
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    assert visible_gpus() == ("0", "1")


@pytest.mark.parametrize(
    ("sections", "num_gpus", "said"),
    [
        (
            {"trainer": {"device": "cuda", "dp_size": 4}, "engine": {"args": {"tp-size": 2}}, "worker": {"count": 4}},
            8,
            "worker.count 4, with 2 GPUs for each engine (tp-size 2), takes 8 GPUs; this machine has 8 GPUs, and the "
            "trainer takes 4 of them: lower worker.count to 2 or a smaller tp-size or fewer ranks (trainer.dp_size) or "
            "engines on the trainer's own GPUs (trainer.colocate true).",
        ),
        (
            {"engine": {"preset": "cuda"}, "worker": {"count": 1}},
            0,
            "this machine has no GPU, and none is the trainer's: set engine.preset cpu",
        ),
        ({"engine": {"args": {"tp-size": 2}}}, 0, "tp-size 2 takes 2 GPUs, and the engine runs on a CPU"),
        ({"trainer": {"colocate": True}}, 8, "and trainer.device cpu has none: remove it"),
        ({"trainer": {"device": "cuda"}}, 0, "takes GPU 0, and this machine has no GPU: lower trainer.dp_size"),
        ({"trainer": {"device": "cuda:7"}}, 4, "trainer.device cuda:7 with trainer.dp_size 1 takes GPU 7, and this"),
        ({"trainer": {"device": "cuda:1", "dp_size": 2}}, 4, "is one GPU, and trainer.dp_size is 2: write device cuda"),
        ({"engine": {"args": {"tp-size": 0}}}, 8, "tp-size 0 is not a number of GPUs"),
        (
            {"engine": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "worker": {"count": 4}},
            8,
            "engine.env.CUDA_VISIBLE_DEVICES names the GPUs of one engine, and worker.count is 4",
        ),
        (
            {
                "trainer": {"device": "cuda", "colocate": True},
                "engine": {"args": {"mem-fraction-static": 0.6}},
                "worker": {"count": 2},
            },
            1,
            "2 engines share a GPU with the trainer",
        ),
        (
            {"trainer": {"device": "cuda", "transport": "cuda_ipc", "dp_size": 2}, "engine": {"args": {"tp-size": 2}}},
            8,
            "An engine takes 2 GPUs (tp-size 2), and those that it may share with the trainer are 1 GPU",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(sections: dict[str, Any], num_gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        place(config(**sections), numbered(num_gpus))


def test_colocated_engines_are_on_the_trainers_gpus_and_by_cuda_ipc_on_that_of_rank_0() -> None:
    shared = {"trainer": {"device": "cuda", "dp_size": 2, "colocate": True}, "worker": {"count": 2}}
    assert place(config(**shared), EIGHT).workers == (("0",), ("1",))

    by_ipc = {"trainer": {"device": "cuda", "dp_size": 2, "transport": "cuda_ipc"}, "worker": {"count": 1}}
    assert place(config(**by_ipc), EIGHT).workers == (("0",),)


def test_a_named_gpu_of_the_trainer_is_kept_free_of_engines() -> None:
    laid_out = place(config(trainer={"device": "cuda:1"}, worker={"count": 2}), numbered(3))

    assert (laid_out.trainer, laid_out.workers) == (("1",), (("0",), ("2",)))


def test_each_worker_sees_its_gpus_alone_and_the_trainer_all() -> None:
    wanted = config(trainer={"device": "cuda"}, worker={"count": 2})

    parts = parts_of(wanted, place(wanted, EIGHT))

    assert {part.name: part.environment for part in parts} == {
        "buffer": {},
        "recorder": {},
        "trainer": {},
        "producer": {},
        "worker-0": {"CUDA_VISIBLE_DEVICES": "1"},
        "worker-1": {"CUDA_VISIBLE_DEVICES": "2"},
    }


def test_a_gateway_is_started_if_agents_run_a_dataset() -> None:
    wanted = config()
    by_agents = [{"name": "a", "path": "a", "environment": "agent"}]
    agents = config(data=wanted.data.model_dump() | {"eval": by_agents})
    laid_out = place(agents, EIGHT)

    assert [part.command for part in parts_of(agents, laid_out) if part.name == "gateway"] == [("serve",)]
    assert "gateway" not in {part.name for part in parts_of(wanted, laid_out)}
    assert "gateway" not in {part.name for part in parts_of(agents, laid_out, ["gateway"])}
    assert "  gateway     no GPU" in as_text(agents, laid_out)
    assert "  gateway     no GPU          left out, to be started" in as_text(agents, laid_out, ["gateway"])


def test_a_fleet_is_started_in_place_of_workers_with_the_gpus_that_the_trainer_leaves() -> None:
    groups = [{"num_gpus": 4, "num_gpus_per_engine": 2}]
    wanted = config(
        trainer={"device": "cuda", "dp_size": 4}, fleet={"models": [{"name": "policy", "server_groups": groups}]}
    )

    laid_out = place(wanted, EIGHT)
    parts = {part.name: part for part in parts_of(wanted, laid_out)}

    assert laid_out.fleet is not None
    assert [engine.environment["CUDA_VISIBLE_DEVICES"] for engine in laid_out.fleet.engines] == ["4,5", "6,7"]
    assert laid_out.free == ()
    assert parts.keys() == {"buffer", "recorder", "trainer", "producer", "fleet"}
    assert parts["fleet"].command == ("fleet", "up")
    assert parts["fleet"].environment == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_a_placeholder_of_a_fleet_stands_for_the_trainer_and_must_be_as_large() -> None:
    def wanted(placeholder: int) -> Config:
        groups = [{"worker_type": "placeholder", "num_gpus": placeholder}, {"num_gpus": 2}]
        fleet = {"models": [{"name": "policy", "server_groups": groups}]}
        return config(trainer={"device": "cuda", "dp_size": 2}, fleet=fleet)

    laid_out = place(wanted(2), EIGHT)
    assert laid_out.fleet is not None
    assert [engine.gpus for engine in laid_out.fleet.engines] == [(0,), (1,), (2,), (3,)]
    assert laid_out.fleet_gpus == EIGHT

    with pytest.raises(ConfigError, match=r"the trainer takes GPUs 0 to 1, and no placeholder holds GPU 1: let the"):
        place(wanted(1), EIGHT)


def test_a_fleet_on_named_nodes_needs_a_placeholder_for_the_trainer() -> None:
    fleet = {
        "nodes": [{"host": ONE[0].host, "num_gpus": 8}],
        "models": [{"name": "policy", "server_groups": [{"num_gpus": 2}]}],
    }

    with pytest.raises(ConfigError, match=re.escape("{worker_type: placeholder, num_gpus: 1}")):
        place(config(trainer={"device": "cuda"}, fleet=fleet), EIGHT)


def test_a_trainer_that_is_left_out_keeps_its_gpus_where_there_are_so_many() -> None:
    wanted = config(trainer={"device": "cuda"}, worker={"count": 1})

    assert place(wanted, numbered(2), {"trainer"}).workers == (("1",),)
    assert place(wanted, (), {"trainer", "worker"}).trainer == ()
    assert place(wanted, numbered(1), {"worker"}).workers == ()


def test_the_examples_fit_on_what_they_name() -> None:
    eight = place(load_config(EXAMPLES / "gsm8k/run.yaml", [], {}), EIGHT)
    assert (eight.trainer, len(eight.workers), eight.free) == (("0", "1"), 6, ())

    one = place(load_config(EXAMPLES / "digits/gpu.yaml", [], {}), numbered(1))
    assert (one.trainer, one.workers) == (("0",), (("0",),))
    by_folder = load_config(EXAMPLES / "digits/gpu.yaml", ["--trainer.transport=disk"], {})
    assert place(by_folder, numbered(1)).workers == (("0",),)
    assert place(load_config(EXAMPLES / "digits/run.yaml", [], {}), ()).workers == ((), ())


def test_the_plan_names_every_process_and_what_is_left() -> None:
    wanted = config(trainer={"device": "cuda", "dp_size": 2}, worker={"count": 1}, engine={"args": {"tp-size": 4}})

    assert as_text(wanted, place(wanted, EIGHT), ()).splitlines() == [
        "run demo, 8 GPUs on this machine",
        "  redis       no GPU          a server of its own",
        "  buffer      no GPU",
        "  recorder    no GPU",
        "  trainer     GPUs 0,1        2 ranks on cuda, weights by disk",
        "  producer    no GPU",
        "  worker-0    GPUs 2,3,4,5    an engine (tp-size 4)",
        "  (free)      GPUs 6,7",
    ]
    left_out = as_text(wanted, place(wanted, EIGHT, {"trainer"}), {"trainer"})
    assert "  trainer     GPUs 0,1        left out, to be started separately" in left_out
