"""Out of memory ends in a sentence with the key to lower: of the trainer as raised, of the engine by its log."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from penstock.config import Config, EngineConfig, ModelConfig
from penstock.consumers.grpo import main
from penstock.errors import EngineDied, PenstockError
from penstock.system.out_of_memory import engine_advice, trainer_error
from penstock.workers.sglang import server

CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 3 is free."


def test_a_trainer_names_its_micro_batches() -> None:
    said = str(trainer_error(torch.OutOfMemoryError(CUDA), device="cuda", max_tokens=16384))
    assert said.startswith("The trainer ran out of memory on cuda (CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert "lower trainer.max_tokens, the tokens of a micro-batch, which is 16384;" in said
    assert "is not set, so a rank's whole share is one micro-batch" in str(
        trainer_error(MemoryError(), device="cpu", max_tokens=None)
    )
    assert trainer_error(RuntimeError("shapes differ"), device="cpu", max_tokens=None) is None
    assert trainer_error(ValueError(CUDA), device="cpu", max_tokens=None) is None


def test_a_trainer_that_is_short_of_memory_raises_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        def __init__(self, *_: Any) -> None: ...

        def stop(self) -> None: ...

        def run(self) -> int:
            return int(torch.empty(2**60, dtype=torch.uint8)[0])  # really refused by the allocator

    monkeypatch.setattr(main, "make_loop", Large)
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    config = Config.model_validate(
        {"run": "r", "model": {"path": "m"}, "data": {"train": [{"name": "t", "path": "t"}]}}
    )

    with pytest.raises(PenstockError, match=r"ran out of memory on cpu \(.*lower trainer\.max_tokens"):
        main.main(config)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"Traceback\n  File x\ntorch.OutOfMemoryError: {CUDA}\nbye", "lower engine.args.mem-fraction-static"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "raise that, raise engine"),
        ("Decode out of memory. Try to lower your batch size.\nTry to allocate 9 tokens.", "max-running-requests"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "ran out of memory"),
    ],
)
async def test_an_engine_that_ran_out_of_memory_says_what_to_change_and_shows_no_traceback(
    tmp_path: Path, log: str, said: str
) -> None:
    python = tmp_path / "python"
    (tmp_path / "said").write_text(log)
    python.write_text(f"#!/bin/bash\ncat {tmp_path / 'said'}; exit 1\n")
    python.chmod(0o755)
    config = EngineConfig(python=str(python))

    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineDied) as caught:
            await server.start(
                lambda: server.spawn(config, ModelConfig(path="m"), name="t", log_dir=tmp_path), session, 60
            )

    text = str(caught.value)
    assert said in text
    assert "ran out of memory" in text
    assert "\n" not in text
    assert "its log is" in text


def test_an_engine_that_died_of_something_else_is_given_no_advice() -> None:
    assert engine_advice("exit code 3\nAddress already in use") == ""
