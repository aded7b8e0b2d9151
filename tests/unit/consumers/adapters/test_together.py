"""One rank that asks for all, over real gloo between processes."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import multiprocessing

from penstock.consumers.adapters.trl import Together
from penstock.errors import ConfigError, ProtocolError
from penstock.records.cause import Cause
from penstock.records.causes import RanksAbsent


def answers(asked: list[Any]) -> list[dict[str, Any]]:
    if any(label == "buried" for _, label in asked):
        raise ProtocolError("a prompt was given up")
    return [{"ids": [*ids, 9], "label": label, "place": place} for place, (ids, label) in enumerate(asked)]


def test_one_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert Together().leads
    found = Together().share(lambda: [([1], "a"), ([2], "b")], answers)
    assert found == {"ids": [[1, 9], [2, 9]], "label": ["a", "b"], "place": [0, 1]}


def test_several_without_a_group_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but torch\.distributed is not begun"):
        Together().share(list, answers)


def refused() -> list[Any]:
    raise ConfigError("no prompt")


def rank_main(rank: int, file: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", str(rank))
        environment.setenv("WORLD_SIZE", "2")
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=300)
        )
        together = Together()
        assert together.leads == (rank == 0)

        def asked_of_me(_: list[Any]) -> list[dict[str, Any]]:
            raise AssertionError("only the first asks")

        ask = answers if rank == 0 else asked_of_me
        mine = [([1], "a")] if rank == 0 else [([2, 3], "b"), ([4], "b")]
        found = together.share(lambda: mine, ask)
        assert found["place"] == ([0] if rank == 0 else [1, 2]), "in the order of the ranks, each its own"
        assert found["ids"] == [[*ids, 9] for ids, _ in mine]
        with pytest.raises(ProtocolError, match="a prompt was given up"):
            together.share(lambda: [([5], "buried" if rank == 1 else "a")], ask)
        with pytest.raises(ConfigError, match="no prompt" if rank == 1 else "Of rank 1: no prompt"):
            together.share(refused if rank == 1 else lambda: mine, ask)
        assert together.share(lambda: mine, ask) == found, "and the next call is clean"
        dist.destroy_process_group()


def late_main(rank: int, file: str) -> None:
    """Rank 1 asks only when it was named: by rank 0, which waits for it, and by rank 2, which waits for rank 0."""
    folder = Path(file).parent
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", str(rank))
        environment.setenv("WORLD_SIZE", "3")
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        environment.setattr("penstock.consumers.adapters.trl.TELL_S", 0.02)
        environment.setattr("penstock.consumers.adapters.trl.LOG_S", 0.02)
        logging.getLogger("penstock.consumers.adapters.trl").addHandler(logging.FileHandler(folder / f"log{rank}"))
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=3, timeout=timedelta(seconds=300)
        )
        told: list[Cause | None] = []

        def blocked_on(cause: Cause | None) -> None:
            told.append(cause)
            (folder / "named").touch()

        together = Together(blocked_on)
        # The group, which all make together.
        together._open()
        while rank == 1 and not ((folder / "named").exists() and said(folder / "log2")):
            time.sleep(0.01)
        together.share(lambda: [([rank], "a")], answers)
        if rank == 0:
            assert told[0] == RanksAbsent(("rank 1 of 3",), "ask")
            assert told[-1] is None
        assert rank == 1 or f"rank {rank} has waited" in said(folder / f"log{rank}")
        dist.destroy_process_group()


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_I8_a_rank_that_is_waited_for_is_named(tmp_path: Path) -> None:
    run_ranks(late_main, 3, tmp_path)
    assert str(RanksAbsent(("rank 1 of 3",), "ask")) in said(tmp_path / "log0")
    assert str(RanksAbsent(("rank 0",), "gather")) in said(tmp_path / "log2")


def test_each_rank_has_the_answers_to_its_own_and_all_raise_what_one_does(tmp_path: Path) -> None:
    run_ranks(rank_main, 2, tmp_path)


def run_ranks(main: Callable[[int, str], None], count: int, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=main, args=(rank, str(folder / "rendezvous"))) for rank in range(count)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert [one.exitcode for one in ranks] == [0] * count
