"""The command line and the environment variables that an SGLang server is started with."""

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.workers.sglang.args import build_command, build_environment, check_arguments
from penstock.workers.sglang.engine import SglangEngine

MODEL = ModelConfig(path="/models/tiny", dtype="float32")


def test_arguments_become_flags() -> None:
    config = EngineConfig(
        python="py", args={"device": "cpu", "disable-cuda-graph": True, "tp_size": 2, "off": False, "ids": [1, 2]}
    )
    command = build_command(config, MODEL, path="/w/v3", version=3, port=5)
    assert " ".join(command) == (
        "py -m sglang.launch_server --model-path /w/v3 --tokenizer-path /models/tiny --host 127.0.0.1 --port 5 "
        "--dtype float32 --weight-version 3 --device cpu --disable-cuda-graph --tp-size 2 --ids 1 2"
    )
    assert build_environment(config)["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in build_environment(EngineConfig())


def test_a_server_of_another_environment_does_not_see_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    other = tmp_path / "python"
    other.symlink_to(Path(sys.executable).resolve())

    assert "PYTHONPATH" not in build_environment(EngineConfig(python=str(other)))
    assert build_environment(EngineConfig(python=sys.executable))["PYTHONPATH"] == "/ours"


def test_a_server_is_not_started_with_masked_variables() -> None:
    config = EngineConfig(env={"BEARER": "***"})
    with pytest.raises(ConfigError, match=r"engine\.env\.BEARER is masked in this file: set PENSTOCK_ENGINE__ENV"):
        check_arguments(config)
    assert "BEARER" not in build_environment(config)


def test_T6_a_server_keeps_nothing_that_old_weights_have_seen_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "100")
    config = EngineConfig(env={"SGLANG_VLM_CACHE_SIZE_MB": "100"})
    assert build_environment(config)["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


@pytest.mark.parametrize("shell", [None, "1", "true", "0"])
@pytest.mark.parametrize(
    ("given", "variable"),
    [
        ({}, "0"),
        ({"logprob_kind": "scaled"}, "0"),
        ({"logprob_kind": "original"}, "1"),
        ({"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "TRUE"}}, "1"),
        ({"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false"}}, "0"),
    ],
)
def test_T6_the_kind_of_logprobs_is_what_the_configuration_says_whatever_the_shell_says(
    given: dict[str, Any], variable: str, shell: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SGLANG_RETURN_ORIGINAL_LOGPROB", raising=False)
    if shell is not None:
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", shell)
    config = EngineConfig.model_validate(given)
    assert build_environment(config)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == variable
    engine = SglangEngine(config, ModelConfig(path=str(tmp_path)), name="t", log_dir=tmp_path)
    assert engine.logprob_kind == {"0": "scaled", "1": "original"}[variable]
    # What is known of an engine goes with its address to who meets it there.
    met = config.model_copy(update={"url": "http://h:1", "args": {}, "env": {}})
    assert met.logprob_kind in (None, engine.logprob_kind)
    assert (met.logprob_kind is None) == (given == {})


@pytest.mark.parametrize("name", ["port", "model-path", "weight_version", "host"])
def test_arguments_that_penstock_gives_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be set"):
        build_command(EngineConfig(args={name: 1}), MODEL, path=".", version=-1, port=1)
