"""Checkpoints: whole or absent, and a damaged newest one falls back to the one before."""

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.consumers.grpo import checkpoint
from penstock.errors import PenstockError
from penstock.system.disk import file_xxh3


def learner(value: float = 1.0) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": 7}


TRAINER = {"sub": "actor", "cursor": 12, "gen": 2}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    state = learner()
    path = checkpoint.save(tmp_path, step=7, learner=state, trainer=TRAINER)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.trainer, found.learner[0]["steps"]) == (path, 7, TRAINER, 7)
    assert torch.equal(found.learner[0]["model"]["weight"], state["model"]["weight"])
    restored = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    restored.load_state_dict(found.learner[0]["optimizer"])
    assert torch.equal(restored.state_dict()["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_random_numbers_go_on_where_they_stood(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, learner={}, trainer={})
    expected = (random.random(), torch.rand(3).tolist())
    found = checkpoint.latest(tmp_path)
    assert found is not None
    found.restore_rng()
    assert (random.random(), torch.rand(3).tolist()) == expected


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, step=step, learner=learner(step), trainer={})
    assert [path.name[:12] for path in sorted(tmp_path.iterdir())] == ["step00000010", "step00000015"]


def test_shards_are_kept_with_the_file_that_names_them(tmp_path: Path) -> None:
    abandoned = checkpoint.save_shard(tmp_path, step=15, rank=1, learner=learner(0))
    for rank in (1, 2):
        (tmp_path / f".writing-rank{rank}-1.pt").write_bytes(b"of a rank that was killed")
    for step in (5, 10, 15):
        name = checkpoint.save_shard(tmp_path, step=step, rank=1, learner=learner(step))
        newest = checkpoint.save(tmp_path, step=step, learner=learner(step), trainer={}, shards=[name])
    assert sorted(path.name[:18] for path in tmp_path.iterdir() if "rank" in path.name) == [
        "step00000010-rank1",
        "step00000015-rank1",
    ]
    assert abandoned != name
    assert not list(tmp_path.glob(".writing-*"))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.path == newest
    assert [float(one["model"]["weight"].flatten()[0].round()) for one in found.learner] == [15.0, 15.0]


def test_one_of_a_step_at_most_is_found_where_a_later_one_is_of_no_use(tmp_path: Path) -> None:
    for step in (5, 10):
        checkpoint.save(tmp_path, step=step, learner={}, trainer={})
    steps = {most: (found := checkpoint.latest(tmp_path, at_most=most)) and found.step for most in (4, 5, 9, 10, None)}
    assert steps == {4: None, 5: 5, 9: 5, 10: 10, None: 10}


@pytest.mark.parametrize("kind", ["flipped", "truncated", "empty"])
def test_a_damaged_newest_one_falls_back_and_says_so(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, step=5, learner=learner(5), trainer={})
    newest = checkpoint.save(tmp_path, step=10, learner=learner(10), trainer={})
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes({"flipped": bytes(data), "truncated": bytes(data[:-100]), "empty": b""}[kind])
    with caplog.at_level(logging.WARNING):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert f"checkpoint {newest} is damaged" in caplog.text
    # Going on from there, the damaged one is given up with everything later.
    checkpoint.save(tmp_path, step=6, learner=learner(6), trainer={})
    assert [path.name[:12] for path in sorted(tmp_path.iterdir())] == ["step00000005", "step00000006"]


def test_all_damaged_is_an_error_not_a_new_start(tmp_path: Path) -> None:
    for step in (5, 10):
        checkpoint.save(tmp_path, step=step, learner={}, trainer={}).write_bytes(b"junk")
    with pytest.raises(PenstockError, match=r"every checkpoint in .* is damaged; move them away"):
        checkpoint.latest(tmp_path)


def test_a_file_with_code_in_it_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil.pt"
    torch.save({"learner": Evil(), "shards": []}, path)
    path.rename(tmp_path / f"step00000001-{file_xxh3(path):016x}.pt")
    with pytest.raises(PenstockError, match="damaged"):
        checkpoint.latest(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_kill_while_writing_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, step=5, learner={}, trainer={})
    child = os.fork()
    if not child:  # as by kill -9: no handler runs
        try:
            monkeypatch.setattr(Path, "replace", lambda *_: os._exit(9))
            checkpoint.save(tmp_path, step=10, learner={}, trainer={})
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 5
    checkpoint.save(tmp_path, step=10, learner={}, trainer={})
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_refuses_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PenstockError, match="the checkpoint of step 5 cannot be written"):
        checkpoint.save(tmp_path / "file", step=5, learner={}, trainer={})
