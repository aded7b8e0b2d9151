"""W&B and trackio by their own libraries, offline: two starts of a trainer make one run, each step once."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.consumers.grpo.trackers.trackers import Trackers
from tests.missing import lack
from tests.unit.consumers.grpo.trackers.test_trackers import config
from tests.wide.prometheus import wait

#: Steps of two starts: the second one begins from a checkpoint of step 3.
LIVES = (range(1, 6), range(4, 8))


#: Libraries that take seconds to import, on a machine that does much else.
PATIENCE_S = 600.0


def run_twice(folder: Path, name: str) -> None:
    for n, steps in enumerate(LIVES):
        with Trackers(config(folder, name)) as shown:
            for step in steps:
                shown.metrics(step, {"train/loss": 100 * n + step, "rollout/zero_std/count_1.0": 1})
            shown.evaluation(10 + n, {"eval/held": n})
            shown.summary({"steps": steps[-1], "audit": "ok"})
            shown.close(PATIENCE_S)
        assert shown.left_out == {name: 0}


def need(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        lack(f"{name} is missing: run make test-wide, or pip install 'penstock[{name}]'")


#: What is shown at the end: the first report of a step counts.
SHOWN = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 106.0), (7, 107.0)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Its own process may take longer to start than it allows.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", str(PATIENCE_S))
    run_twice(tmp_path, "wandb")
    files = sorted((tmp_path / "r").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    # Its process writes on for a moment after `finish`; that it has written all is its last record.
    wait(lambda: all(is_over(wandb_records(file)) for file in files), lambda: "a run was not ended")
    records = [record for file in files for record in wandb_records(file)]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == SHOWN
    assert [(row["eval/version"], row["eval/held"]) for row in rows if "eval/version" in row] == [(10, 0), (11, 1)]
    assert [row["_step"] for row in rows] == list(range(9)), "rows of both starts are numbered on"
    assert {record.run.run_id for record in records if record.HasField("run")} == {file.stem[4:] for file in files}
    assert len({file.name for file in files}) == 1
    text = "".join(map(str, records))
    assert "hush" not in text
    assert '"ok"' in text or '\\"ok\\"' in text


#: The file's head, its blocks, and the head of a chunk: its checksum, length and kind (1: whole, 2 to 4: of several).
HEAD, BLOCK, CHUNK = 7, 32 * 1024, 7


def wandb_records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in chunks(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def is_over(records: list[Any]) -> bool:
    return any(record.HasField("exit") for record in records)


def chunks(data: bytes) -> Iterator[bytes]:
    """Entries of a log of LevelDB's kind."""
    at, entry = HEAD, b""
    while at + CHUNK < len(data):
        if (room := BLOCK - at % BLOCK) < CHUNK:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + CHUNK + length > len(data):
            return
        entry += data[at + CHUNK : at + CHUNK + length]
        at += CHUNK + length
        if kind in (1, 4):
            yield entry
            entry = b""


UNREACHABLE = """
import sys
from pathlib import Path
from penstock.consumers.grpo.trackers.trackers import Trackers
from tests.unit.consumers.grpo.trackers.test_trackers import config
shown = Trackers(config(Path(sys.argv[1]), sys.argv[2]))
shown.metrics(1, {"train/loss": 1.0})
shown.close(0.1)
print("closed", flush=True)
"""
#: What the libraries wait for by themselves is a minute and a half, or for ever; seconds here, and a slow machine's.
ENDS_S = 75.0


def test_a_server_that_never_answers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    need("wandb")
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        servers = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}
        with subprocess.Popen(
            [sys.executable, "-c", UNREACHABLE, str(tmp_path), "wandb"],
            env={**os.environ, **servers},
            stdout=subprocess.PIPE,
        ) as trainer:
            try:
                assert trainer.stdout is not None
                assert trainer.stdout.readline() == b"closed\n"
                assert trainer.wait(ENDS_S) == 0
            finally:
                trainer.kill()


TRACKIO = """
import json, sys
from pathlib import Path
from tests.wide.test_trackers import run_twice
run_twice(Path(sys.argv[1]), "trackio")
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("penstock")
print(json.dumps({run: SQLiteStorage.get_logs("penstock", run) for run in runs}, default=str))
"""


def test_trackio_in_a_folder(tmp_path: Path) -> None:
    need("trackio")
    # It reads where it writes when it is imported.
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    ((name, rows),) = json.loads(done.stdout.splitlines()[-1]).items()
    assert name.startswith("r-20")
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == SHOWN
    assert [(row["step"], row["eval/held"]) for row in rows if "eval/held" in row] == [(10, 0), (11, 1)]
    assert [row["summary/steps"] for row in rows if "summary/steps" in row] == [5, 7]
    assert not any("hush" in file.read_text(errors="replace") for file in (tmp_path / "trackio").rglob("*.db*"))
