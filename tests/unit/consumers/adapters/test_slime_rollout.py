"""What slime's hooks do without slime: weights kept for the next rollout, and what is refused."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from consumers.adapters import slime_rollout
from penstock.errors import ConfigError


def write(folder: Path, version: int, content: bytes) -> None:
    written = folder / f"weight_v{version:06d}"
    written.mkdir(parents=True, exist_ok=True)
    (written / "model.safetensors").write_bytes(content)
    slime_rollout.weights_written(Namespace(), str(written), [])
    (written / "model.safetensors").unlink()


def test_weights_outlive_the_folder_that_slime_deletes(tmp_path: Path) -> None:
    write(tmp_path, 1, b"one")
    [kept] = slime_rollout._linked(tmp_path)
    assert (kept / "model.safetensors").read_bytes() == b"one"


def test_weights_of_a_restart_go_before_those_that_its_predecessor_left(tmp_path: Path) -> None:
    write(tmp_path, 7, b"of the killed one")
    left = tmp_path / "penstock_weight_v000007"
    os.utime(left, (1, 1))
    write(tmp_path, 1, b"restored")
    assert (slime_rollout._linked(tmp_path)[-1] / "model.safetensors").read_bytes() == b"restored"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({}, "penstock_run"),
        ({"penstock_run": "r", "rm_type": "math"}, "--rm-type has no effect"),
        (
            {"penstock_run": "r", "custom_generate_function_path": "a.b"},
            "--custom-generate-function-path has no effect",
        ),
    ],
)
def test_what_has_no_effect_is_refused_by_its_flag(said: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        slime_rollout.generate_rollout(Namespace(**said), 0, None)
