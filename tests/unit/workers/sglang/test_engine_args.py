"""Arguments of the engine against a parser: a typo fails with what was meant, before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.workers.sglang import args as engine_args
from penstock.workers.sglang.args import check_arguments

PARSER = [
    [["tensor-parallel-size", "tp-size"], "one", "int", []],
    [["mem-fraction-static"], "one", "float", []],
    [["attention-backend"], "one", "str", ["flashinfer", "torch_native", "triton"]],
    [["disable-radix-cache"], "nothing", "str", []],
    [["overlap", "no-overlap"], "nothing", "str", []],
    [["cuda-graph-bs-decode"], "many", "int", []],
    [["disable-prefill-cuda-graph"], "nothing", "str", []],
    [["cuda-graph-config"], "one", "loads", []],
]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes configurations whose interpreter answers as an installed SGLang; counts how often it is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_args, "_known", {})
    python, version = tmp_path / "python", tmp_path / "version"
    version.write_text("0.5.20")
    python.write_text(
        "#!/bin/bash\n"
        f'case "$3" in *add_cli_args*) echo x >> {tmp_path}/asked; echo noise; '
        f"echo 'penstock-arguments: {json.dumps(PARSER)}';;\n"
        f'*) echo "penstock-arguments: $(cat {version}) /there 1";; esac\n'
    )
    python.chmod(0o755)
    return lambda **args: EngineConfig(python=str(python), args={name.replace("_", "-"): v for name, v in args.items()})


def refusal(config: EngineConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_arguments(config)
    return str(caught.value)


def test_what_the_installed_release_knows_passes(make: Any) -> None:
    config = make(
        tp_size=2, mem_fraction_static=0.3, attention_backend="triton", disable_radix_cache=True, no_overlap=True,
        cuda_graph_bs_decode=[1, 2], cuda_graph_config={"decode": {"backend": "full"}}, tensor_parallel_size=None,
    )  # fmt: skip
    assert check_arguments(config).version == "0.5.20"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tp_sise": 2}, "engine.args.tp-sise: SGLang 0.5.20 has no such argument; did you mean tp-size?"),
        ({"mem_fraction": 0.3}, "did you mean mem-fraction-static?"),
        ({"disable_piecewise_cuda_graph": True}, "it was renamed to disable-prefill-cuda-graph."),
        ({"zzz": 1}, "has no such argument."),
        ({"attention_backend": "torch_natve"}, "did you mean torch_native?"),
        ({"tp_size": "two"}, "'two' is not an integer."),
        ({"tp_size": [1, 2]}, "takes one value, not 2"),
        ({"tp_size": True}, "needs a value"),
        ({"cuda_graph_bs_decode": [1, "x"]}, "'x' is not an integer."),
        ({"mem_fraction_static": "half"}, "is not a number."),
        ({"disable_radix_cache": 1}, "is a switch"),
        ({"overlap": False}, "write `no-overlap: true`"),
        ({"dtype": "bfloat16"}, "use model.dtype"),
        ({"config": "a.yaml"}, "use engine.args"),
        ({"preferred_sampling_params": {"temperature": 0.5}}, "use rollout.sampling"),
        ({"preferred_sampling_params": "{}"}, "use rollout.sampling"),
        ({"speculative_accept_threshold_single": 0.5}, "accepts draft tokens that the model would not sample"),
    ],
)
def test_what_it_would_not_take_is_refused_with_what_was_meant(make: Any, args: dict[str, Any], says: str) -> None:
    assert says in refusal(make(**args))


def test_every_mistake_is_told(make: Any) -> None:
    assert len(refusal(make(tp_sise=2, zzz=1)).splitlines()) == 2


def test_it_is_asked_once_for_each_installation(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = tmp_path / "asked"
    check_arguments(make(tp_size=2))
    check_arguments(make(tp_size=2))
    monkeypatch.setattr(engine_args, "_known", {})  # another process
    check_arguments(make(tp_size=2))
    assert len(asked.read_text().split()) == 1

    (tmp_path / "version").write_text("0.5.21")
    assert check_arguments(make(tp_size=2)).version == "0.5.21"
    assert len(asked.read_text().split()) == 2

    monkeypatch.setattr(engine_args, "_known", {})
    for kept in (tmp_path / "cache" / "penstock").iterdir():
        kept.write_text("[]")
    check_arguments(make(tp_size=2))
    assert len(asked.read_text().split()) == 3
    assert "rewriting it" in caplog.text


def test_a_release_that_is_too_old_is_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("0.5.16")
    assert "needs 0.5.17 or later" in refusal(make())


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo \"No module named 'sglang'\" >&2; exit 1", "has no sglang"),
        ("echo broken libtorch >&2; exit 1", "broken libtorch"),
        ("exit 0", "failed to import sglang"),
    ],
)
def test_an_environment_that_does_not_answer_is_a_mistake_in_the_configuration(
    tmp_path: Path, script: str, says: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    assert says in refusal(EngineConfig(python=str(python)))
