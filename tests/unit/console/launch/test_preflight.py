"""What can be known to fail before anything is started."""

import base64
import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.console.launch import preflight
from penstock.console.launch.preflight import check
from penstock.errors import ConfigError
from tests.tiny_vision import png


def by(transport: str, folder: Path, **sections: Any) -> Config:
    trainer = {"transport": transport, "device": "cuda"}
    return Config.model_validate(
        {
            "run": "r",
            "model": {"path": str(folder)},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "trainer": trainer,
            **sections,
        }
    )


@pytest.mark.parametrize("without", [["worker", "trainer"], ["trainer"], ["worker"]])
def test_a_part_that_is_left_out_needs_nothing_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: list[str]
) -> None:
    monkeypatch.setattr("penstock.system.extras.is_installed", lambda one: one != "transformers")
    config = by("disk", tmp_path, engine={"python": "/nonexistent"})
    found = dict(preflight.steps(config, without=without))
    assert ("engine" in found) == ("worker" not in without)
    if len(without) == 2:
        found["packages"]()
        return
    with pytest.raises(ConfigError, match=r"(a worker|the reference trainer) needs transformers"):
        found["packages"]()


def test_a_subscription_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = by("disk", tmp_path, staleness={"mode": "one_step"}, trainer={"subscription": {"sampler": "fifo"}})
    with pytest.raises(ConfigError, match="mode one_step trains complete cohorts, but sampler is fifo"):
        check(config)


def test_the_gateway_is_checked_if_agents_run_a_dataset(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = {"port": taken.getsockname()[1]}
        assert "address of the gateway" not in dict(preflight.steps(by("disk", tmp_path, agents=port)))
        data = {"train": [{"name": "d", "path": "d.jsonl", "environment": "agent"}]}
        agents = by("disk", tmp_path, agents=port, data=data)

        assert "address of the gateway" not in dict(preflight.steps(agents, without=["gateway"]))
        found = dict(preflight.steps(agents))
        found["TLS of the gateway"]()
        with pytest.raises(ConfigError, match=r"agents\.host 127\.0\.0\.1, agents\.port \d+ cannot be listened on"):
            found["address of the gateway"]()


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("reads", [True, False])
def test_images_for_a_model_that_reads_none_are_refused_before_anything_starts(
    tmp_path: Path, reads: bool, num_before: int
) -> None:
    (tmp_path / "config.json").write_text('{"image_token_id": 7}' if reads else "{}")
    image = {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"}
    line = {"prompt": [{"role": "user", "content": [image, {"type": "text", "text": "colour?"}]}], "label": "red"}
    words = [
        {"prompt": [{"role": "user", "content": f"what is {number}?"}], "label": "x"} for number in range(num_before)
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, [*words, line])))
    dataset = {"name": "d", "path": str(tmp_path / "d.jsonl"), "apply_chat_template": True}
    config = by("disk", tmp_path, data={"train": [dataset]})
    says = rf"dataset d has images \(line {num_before + 1}\), and model.path .* reads none"
    with nullcontext() if reads else pytest.raises(ConfigError, match=says):
        preflight.check_data(config)


@pytest.fixture
def slow_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter of an overloaded machine: it does not answer in time."""
    monkeypatch.setattr(preflight, "_ANSWER_S", 0.2)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    return str(script)


def test_an_interpreter_that_does_not_answer_is_told_from_one_that_lacks_something(slow_python: str) -> None:
    with pytest.raises(ConfigError, match=r"did not answer within 0\.2 s: this machine may be overloaded"):
        preflight.check_engine(slow_python)


def test_a_summary_is_written_where_the_engine_does_not_say_its_version(
    slow_python: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for python in (slow_python, str(tmp_path / "gone")):
        assert preflight.engine_version(by("disk", tmp_path, engine={"python": python})) == "unknown"
    assert len(caplog.records) == 2
