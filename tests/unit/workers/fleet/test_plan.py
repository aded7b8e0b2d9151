"""From groups in a YAML to exact commands: GPUs, ports, roles; and every contradiction by its sentence."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config import Config
from penstock.config.load import load_config
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import numbered
from penstock.workers.fleet import nodes
from penstock.workers.fleet.nodes import Node, Ports, reserve
from penstock.workers.fleet.plan import Plan, plan
from penstock.workers.fleet.show import as_records, as_text

ONE = [Node("127.0.0.1", numbered(8))]
TWO = [Node("10.0.0.1", numbered(8)), Node("10.0.0.2", numbered(8))]


def make(*groups: dict[str, Any], engine: dict[str, Any] | None = None, **over: Any) -> Config:
    fleet = {"models": [{"name": "policy", "server_groups": list(groups)}]} | over
    return Config.model_validate(
        {
            "run": "t",
            "model": {"name": "policy", "path": "/m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "engine": {"python": "/env/bin/python", "args": {"attention-backend": "triton"}} | (engine or {}),
            "fleet": fleet,
        }
    )


def flags(plan: Plan, name: str) -> dict[str, list[str]]:
    """Arguments of an engine's command by flag."""
    command = next(engine.command for engine in plan.engines if engine.name == name)
    found: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            found[word] = []
        else:
            list(found.values())[-1].append(word)
    return found


def test_regular_engines_are_started_by_a_worker_each() -> None:
    laid_out = plan(make({"num_gpus": 4, "num_gpus_per_engine": 2, "overrides": {"mem-fraction-static": 0.7}}), ONE)
    assert [(e.name, e.gpus, e.started_by) for e in laid_out.engines] == [
        ("policy.regular-0.0", (0, 1), "worker"),
        ("policy.regular-0.1", (2, 3), "worker"),
    ]
    assert laid_out.engines[1].command == (
        "/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/m", "--tokenizer-path", "/m",
        "--host", "127.0.0.1", "--port", "20010", "--dtype", "auto", "--attention-backend", "triton",
        "--mem-fraction-static", "0.7", "--tp-size", "2", "--nccl-port", "20011",
    )  # fmt: skip
    assert laid_out.engines[1].environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert [worker.name for worker in laid_out.workers] == ["policy.regular-0.0", "policy.regular-0.1"]
    assert laid_out.workers[1].engine.port == 20010
    assert laid_out.workers[1].engine.env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_without_a_section_there_are_worker_count_engines() -> None:
    config = Config.model_validate(
        {
            "run": "t",
            "model": {"path": "/m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "worker": {"count": 3},
        }
    )
    laid_out = plan(config, [Node("127.0.0.1")])
    assert [worker.name for worker in laid_out.workers] == [f"policy.worker.{index}" for index in range(3)]
    assert all(engine.gpus == () and "CUDA_VISIBLE_DEVICES" not in engine.environment for engine in laid_out.engines)
    laid_out.add("policy.worker")
    assert laid_out.workers[-1].name == "policy.worker.3"


def test_overrides_win_however_they_are_spelt() -> None:
    laid_out = plan(make({"num_gpus": 1, "overrides": {"attention_backend": "fa3"}}), ONE)
    assert flags(laid_out, "policy.regular-0.0")["--attention-backend"] == ["fa3"]


def test_prefill_decode_encoders_and_their_router() -> None:
    laid_out = plan(
        make(
            {"worker_type": "placeholder", "num_gpus": 2, "num_gpus_per_engine": 2},
            {"worker_type": "prefill", "num_gpus": 2, "num_gpus_per_engine": 2},
            {"worker_type": "decode", "num_gpus": 8, "num_gpus_per_engine": 4},
            {"worker_type": "encoder", "num_gpus": 2},
        ),
        TWO,
    )
    where = {engine.name: (engine.host, engine.gpus) for engine in laid_out.engines}
    assert where == {
        "policy.placeholder-0.0": ("10.0.0.1", (0, 1)),
        "policy.prefill-1.0": ("10.0.0.1", (2, 3)),
        "policy.decode-2.0": ("10.0.0.1", (4, 5, 6, 7)),
        "policy.decode-2.1": ("10.0.0.2", (0, 1, 2, 3)),
        "policy.encoder-3.0": ("10.0.0.2", (4,)),
        "policy.encoder-3.1": ("10.0.0.2", (5,)),
    }
    assert laid_out.engines[0].command == ()
    encoders = [engine.url for engine in laid_out.engines if engine.worker_type == "encoder"]
    prefill = flags(laid_out, "policy.prefill-1.0")
    assert prefill["--disaggregation-mode"] == ["prefill"]
    assert prefill["--language-only"] == []
    assert prefill["--encoder-urls"] == encoders == ["http://10.0.0.2:20010", "http://10.0.0.2:20020"]
    assert flags(laid_out, "policy.encoder-3.1")["--encoder-only"] == []
    decode = flags(laid_out, "policy.decode-2.1")
    assert decode["--disaggregation-mode"] == ["decode"]
    assert "--encoder-urls" not in decode
    assert decode["--tp-size"] == ["4"]
    (router,) = laid_out.routers
    assert {"--pd-disaggregation", "--disable-retries"} <= set(router.command)
    assert [(m.worker_type, m.bootstrap_port) for m in router.router.engines] == [
        ("prefill", int(prefill["--disaggregation-bootstrap-port"][0])),
        ("decode", None),
        ("decode", None),
    ]
    (worker,) = laid_out.workers
    assert worker.engine.router == router.router
    assert laid_out.endpoints()["policy"] == router.url


def test_encoders_serve_regular_engines_where_there_is_no_prefill() -> None:
    laid_out = plan(make({"num_gpus": 1}, {"worker_type": "encoder", "num_gpus": 1}), ONE)
    regular = flags(laid_out, "policy.regular-0.0")
    assert regular["--encoder-urls"] == [laid_out.engines[1].url]
    assert "--language-only" in regular


def test_an_engine_over_two_nodes_has_one_address_and_one_worker() -> None:
    laid_out = plan(make({"num_gpus": 16, "num_gpus_per_engine": 16}), TWO)
    first, second = laid_out.engines
    assert (first.url, second.url) == ("http://10.0.0.1:20000", "")
    for rank, name in enumerate(["policy.regular-0.0.n0", "policy.regular-0.0.n1"]):
        got = flags(laid_out, name)
        assert (got["--nnodes"], got["--node-rank"]) == (["2"], [str(rank)])
        assert got["--dist-init-addr"] == ["10.0.0.1:20003"]
        assert got["--tp-size"] == ["16"]
    (worker,) = laid_out.workers
    assert worker.engine.url == first.url
    assert worker.engine.args == {}


def test_frozen_models_have_addresses_and_no_worker() -> None:
    models = [
        {"name": "policy", "server_groups": [{"num_gpus": 1}]},
        {"name": "reference", "model_path": "/ref", "update_weights": False, "server_groups": [{"num_gpus": 1}]},
        {"name": "reward", "model_path": "/rm", "server_groups": [{"num_gpus": 2}]},
    ]
    laid_out = plan(make(models=models), ONE)
    assert [worker.name for worker in laid_out.workers] == ["policy.regular-0.0"]
    assert laid_out.endpoints()["reference"] == next(e.url for e in laid_out.engines if e.model == "reference")
    assert laid_out.endpoints()["reward"] == next(r.url for r in laid_out.routers)
    assert flags(laid_out, "reward.regular-0.1")["--model-path"] == ["/rm"]
    assert [engine.gpus for engine in laid_out.engines] == [(0,), (1,), (2,), (3,)]


def test_running_servers_reserve_no_gpu() -> None:
    laid_out = plan(make({"urls": ["http://10.0.0.9:1", "http://10.0.0.8:1/"]}, {"num_gpus": 8}), ONE)
    assert len([engine for engine in laid_out.engines if engine.gpus]) == 8
    assert [worker.engine.url for worker in laid_out.workers[:2]] == ["http://10.0.0.9:1", "http://10.0.0.8:1"]
    routed = plan(make(models=[{"name": "policy", "router": {}, "server_groups": [{"urls": ["http://h:1"]}]}]), ONE)
    assert [worker.name for worker in routed.workers] == ["policy.routed"]
    assert routed.routers[0].router.engines[0].url == "http://h:1"


def ports_of(laid_out: Plan) -> list[int]:
    found = [port for engine in laid_out.engines for port in engine.ports.values()]
    return found + [
        port
        for one in laid_out.routers
        for port in (one.router.port, int(one.command[one.command.index("--prometheus-port") + 1]))
    ]


def test_every_port_of_a_node_is_given_once() -> None:
    groups = [
        {"worker_type": "prefill", "num_gpus": 2},
        {"worker_type": "decode", "num_gpus": 2, "overrides": {"enable-dp-attention": True}},
    ]
    other = {"name": "rm", "model_path": "/rm", "server_groups": [{"num_gpus": 2}]}
    laid_out = plan(make(models=[{"name": "policy", "server_groups": groups}, other]), ONE)
    ports = ports_of(laid_out)
    for engine in laid_out.engines:
        if first := engine.ports.get("dist_init"):
            ports += range(first + 1, first + 7)
    assert len(ports) == len(set(ports)) == 2 * 3 + 2 * (2 + 7) + 2 + 2 * 2 + 2
    assert flags(laid_out, "policy.decode-1.1")["--dist-init-addr"][0].startswith("127.0.0.1:")


def test_growing_moves_nobody() -> None:
    made = plan(make({"num_gpus": 2}, {"worker_type": "placeholder", "num_gpus": 1}), [Node("127.0.0.1", numbered(4))])
    old = list(made.engines)
    made.add("policy.regular-0")
    assert made.engines[: len(old)] == old
    assert made.engines[-1].gpus == (3,), "the placeholder keeps GPU 2"
    assert len(ports_of(made)) == len(set(ports_of(made))) == 6
    assert made.workers[-1].name == "policy.regular-0.2"
    with pytest.raises(ConfigError, match=r"needs 1 GPUs .* what is free is: 127.0.0.1 0 of 4"):
        made.add("policy.regular-0")
    assert len(made.engines) == 4
    made.remove("policy.regular-0.0")
    assert [worker.name for worker in made.workers] == ["policy.regular-0.1", "policy.regular-0.2"]
    made.add("policy.regular-0")
    again = made.engines[-1]
    assert (again.name, again.gpus, again.ports) == ("policy.regular-0.0", (0,), old[0].ports)
    with pytest.raises(ConfigError, match=r"no group policy.other; it has policy.regular-0, policy.placeholder-1"):
        made.add("policy.other")


def test_growing_behind_a_router_tells_its_worker() -> None:
    made = plan(make(models=[{"name": "policy", "router": {}, "server_groups": [{"num_gpus": 1}]}]), ONE)
    made.add("policy.regular-0")
    first, second = made.engines
    (worker,), (router,) = made.workers, made.routers
    assert worker.engine.router == router.router
    assert [member.url for member in router.router.engines] == [first.url, second.url]
    made.remove(first.owner)
    assert [member.url for member in made.routers[0].router.engines] == [second.url]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([{"worker_typ": "prefill"}], "worker_typ"),
        ([{"num_gpus": 3, "num_gpus_per_engine": 2}], "num_gpus 3 cannot be divided into engines of 2"),
        ([{"num_gpus": 9}], "policy.regular-0.8 needs 1 GPUs"),
        ([{"num_gpus": 12, "num_gpus_per_engine": 12}], "12 GPUs cannot be divided over nodes of 8"),
        ([{"num_gpus": 1, "gpus": [3]}, {"num_gpus": 1, "gpus": [3]}], "both want GPU 3 of 127.0.0.1"),
        ([{"num_gpus": 1, "gpus": [9]}], "has no GPU 9"),
        ([{"num_gpus": 1, "host": "h"}], "host h is not a node of the fleet"),
        ([{"worker_type": "prefill", "num_gpus": 1}], "prefill engines but no decode"),
        ([{"worker_type": "decode", "num_gpus": 1}], "decode engines but no prefill"),
        ([{"worker_type": "encoder", "num_gpus": 1}], "encoders but no engines that use them"),
        ([{}], "set num_gpus, num_engines"),
        ([{"worker_type": "placeholder"}], "a placeholder occupies GPUs"),
        ([{"num_gpus": 1, "num_engines": 1}], "num_engines is for engines without GPUs"),
        ([{"urls": ["http://h:1"], "num_gpus": 1}], "num_gpus would change nothing"),
        ([{"urls": ["h:1"]}], "not the address of a server"),
        ([{"urls": ["http://u:secret@h:1"]}], "cannot hold a password"),
        ([{"num_gpus": 1, "env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}], "set engine.logprob_kind instead"),
        ([{"num_gpus": 2, "num_gpus_per_engine": 2, "overrides": {"tp-size": 4}}], "4, and an engine has 2 GPUs"),
        ([{"num_gpus": 1, "overrides": {"nnodes": 2}}], "nnodes cannot be set, because the fleet sets it"),
        ([{"num_gpus": 1, "overrides": {"port": 1}}], "port cannot be set"),
        ([{"num_gpus": 1, "env": {"CUDA_VISIBLE_DEVICES": "1"}}], "CUDA_VISIBLE_DEVICES cannot be set"),
        ([{"num_gpus": 1, "name": "a"}, {"num_gpus": 1, "name": "a"}], "two groups a"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(groups: list[dict[str, Any]], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        plan(make(*groups), ONE)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"models": [{"name": "x", "model_path": "/x", "server_groups": [{"num_gpus": 1}]}]}, "has no model policy"),
        ({"models": [{"name": "policy", "update_weights": False, "server_groups": [{"num_gpus": 1}]}]}, "freeze it"),
        ({"models": [{"name": "policy", "model_path": "/o", "server_groups": [{"num_gpus": 1}]}]}, "remove model_path"),
        (
            {
                "models": [
                    {"name": "policy", "server_groups": [{"num_gpus": 1}]},
                    {"name": "rm", "model_path": "/x", "update_weights": True, "server_groups": [{"num_gpus": 1}]},
                ]
            },
            "a frozen model gets no publications",
        ),
        (
            {
                "models": [
                    {"name": "policy", "server_groups": [{"num_gpus": 1}]},
                    {"name": "rm", "server_groups": [{"num_gpus": 1}]},
                ]
            },
            "set its model_path",
        ),
        ({"ports": [20000, 20002]}, r"\[20000, 20002\] is too small for host 127.0.0.1: no block of 10 ports"),
        ({"ports": [2, 1]}, "is not a range"),
    ],
)
def test_fleets_that_cannot_be_are_refused(over: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        plan(make({"num_gpus": 2}, **over), ONE)


def test_one_way_of_naming_engines() -> None:
    with pytest.raises(ConfigError, match=r"engine\.url names engines, and fleet\.models plans them"):
        plan(make({"num_gpus": 1}, engine={"url": "http://h:1", "args": {}}), ONE)


def test_a_typo_in_the_file_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    values = make({"num_gpus": 1}).model_dump(mode="json", exclude_unset=True)
    values["fleet"]["models"][0]["server_groups"][0]["num_gpu"] = 1
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"server_groups\.0\.num_gpu .*did you mean .*num_gpus"):
        load_config(file, [], {})


def test_paths_of_models_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    rm = {"name": "rm", "model_path": "rm", "server_groups": [{"num_gpus": 1}]}
    values = make(models=[{"name": "policy", "server_groups": [{"num_gpus": 1}]}, rm])
    file.write_text(yaml.safe_dump(values.model_dump(mode="json", exclude_unset=True)))
    assert load_config(file, [], {}).fleet.models[1].model_path == str(tmp_path / "rm")


def test_the_plan_shows_the_names_of_all_variables_and_no_value_of_an_env_section() -> None:
    group = {"num_gpus": 1, "env": {"HF_TOKEN": "of-the-group", "PLAIN": "ordinary"}}
    laid_out = plan(make(group, engine={"env": {"COOKIE": "of-the-engine"}}), ONE)
    shown = as_text(laid_out) + str(as_records(laid_out))
    assert not [value for value in ("of-the-group", "ordinary", "of-the-engine") if value in shown]
    assert all(f"{name}='***'" in as_text(laid_out) for name in ("HF_TOKEN", "PLAIN", "COOKIE"))
    assert "CUDA_VISIBLE_DEVICES=0 " in as_text(laid_out), "what penstock itself sets is shown"
    assert as_records(laid_out)["workers"][0]["feeds"] == "http://127.0.0.1:20000"


def test_a_block_of_ports_is_given_once_and_not_where_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "reserve", lambda first: None if first == 20 else socket.socket())
    ports = Ports("h", 5, 50, reserves=True)
    assert [ports.take(owner) for owner in "abb"] == [10, 30, 40]
    with pytest.raises(
        ConfigError,
        match=r"\[5, 50\] is too small for host h: no block of 10 ports from a multiple of 10 is free for c",
    ):
        ports.take("c")
    ports.release("b")
    assert ports.take("c") == 30
    for owner in "ac":
        ports.release(owner)


def test_a_reserved_block_is_nobody_elses_nor_is_one_with_a_port_in_use() -> None:
    first = next(first for first in range(20_000, 30_000, 10) if (held := reserve(first)) is not None)
    assert held is not None
    assert reserve(first) is None
    held.close()
    with socket.create_server(("127.0.0.1", first + 9)):
        assert reserve(first) is None
    again = reserve(first)
    assert again is not None
    again.close()
