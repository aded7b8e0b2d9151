"""Parts that are started one by one: in any order, found by a trainer of one's own, no password where none may be."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.load import load_config
from penstock.console.cli import main as cli
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, QueueRefused
from penstock.records.keys import Keys
from penstock.redis.connect import connect
from penstock.redis.saved_config import keep_config
from penstock.redis.server import RedisServer, read_address
from penstock.system.run_folder import RunFolder

ROOT = Path(cli.__file__).resolve().parents[2]
PASSWORD = "hush-hush"


def until(condition: Callable[[], Any], what: str, limit_s: float = 400.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


class Hand:
    """A folder with ``run.yaml``, and parts that are started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "demo"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
        self.config: dict[str, Any] = {
            "run": "demo",
            "model": {"path": "model"},
            "data": {"train": [{"name": "t", "path": "train.jsonl"}]},
            "engine": {"env": {"HF_TOKEN": PASSWORD}},
        }
        self.started: list[subprocess.Popen[bytes]] = []

    @property
    def yaml(self) -> Path:
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def start(self, part: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        with self.log(part).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli", part, "--config", str(self.yaml), *arguments],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def log(self, part: str) -> Path:
        return self.folder / f"{part}.log"

    def says(self, part: str, words: str) -> None:
        def said() -> bool:
            text = self.log(part).read_text()
            assert self.started[-1].poll() is None, text
            return words in text

        until(said, f"{part} to say {words!r}")


@pytest.fixture
def hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hand]:
    monkeypatch.chdir(tmp_path)
    made = Hand(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis with a password."""
    server = RedisServer(tmp_path / "guarded", password=PASSWORD)
    server.start()
    yield server
    server.kill()


def test_parts_may_start_before_the_redis_of_their_run_and_wait_for_it_by_name(hand: Hand) -> None:
    buffer = hand.start("buffer")
    hand.says("buffer", "waiting for Redis for 0 s: no Redis is known for run demo")
    assert buffer.poll() is None

    hand.start("redis")

    url = until(lambda: read_address(hand.run_dir), "the address of Redis")
    with connect(url) as client:
        until(lambda: client.exists(Keys("demo").leader), "the buffer to lead")
    buffer.send_signal(signal.SIGTERM)
    assert buffer.wait(60) == 0


def test_an_address_that_an_earlier_redis_left_is_read_anew(hand: Hand, redis_server: RedisServer) -> None:
    config = load_config(hand.yaml, ["--redis.url=redis://127.0.0.1:1/0"], {})
    keep_config(config, hand.folder / "run.yaml", replace=True)
    hand.start("buffer")
    hand.says("buffer", "No Redis answers at redis://127.0.0.1:1/0")

    keep_config(load_config(hand.yaml, [f"--redis.url={redis_server.url}"], {}), hand.folder / "run.yaml", replace=True)

    hand.says("buffer", "Redis answers")


def test_sigterm_ends_the_wait_for_redis(hand: Hand) -> None:
    buffer = hand.start("buffer", "--redis.url=redis://127.0.0.1:1/0")
    hand.says("buffer", "waiting for Redis for 0 s: No Redis answers at redis://127.0.0.1:1/0")

    buffer.send_signal(signal.SIGTERM)

    assert buffer.wait(60) == cli.EXIT_INTERRUPT
    assert "Traceback" not in hand.log("buffer").read_text()


@pytest.mark.parametrize("part", ["buffer", "producer", "worker", "trainer"])
def test_a_wrong_password_ends_a_part_at_once(hand: Hand, guarded: RedisServer, part: str) -> None:
    process = hand.start(part, f"--redis.url={guarded.url.replace(PASSWORD, 'wrong')}")

    assert process.wait(120) == 2
    said = hand.log(part).read_text()
    assert "refuses the password: set the right one in redis.url" in said
    assert "Traceback" not in said
    assert "wrong" not in said.replace("a wrong password", "")


def test_a_trainer_of_ones_own_finds_what_was_started_by_hand(hand: Hand, guarded: RedisServer) -> None:
    hand.config["redis"] = {"url": guarded.url, "payload_servers": {"p1": guarded.url}}
    hand.config["trainer"] = {"batch_groups": 7}
    hand.start("buffer")
    hand.start("producer")
    with connect(guarded.url) as client:
        until(lambda: client.exists(Keys("demo").source), "the producer")

        with Trainer(run="demo") as trainer:
            assert trainer.config.trainer.batch_groups == 7
            assert trainer.config.redis.url == guarded.url
            assert trainer.config.redis.payload_servers == {"p1": guarded.url}
            with pytest.raises(ConfigError, match="owned by a live trainer"), Trainer(config="run.yaml"):
                pass
        with Trainer("run.yaml") as trainer:
            assert trainer.config.trainer.batch_groups == 7

        held = [client.dump(key) for key in client.scan_iter() if key != Keys("demo").servers.encode()]
    assert not any(PASSWORD.encode() in value for value in held if value)


def test_passwords_lie_in_files_of_mode_600_alone(hand: Hand, guarded: RedisServer) -> None:
    hand.config["redis"] = {"url": guarded.url}
    buffer = hand.start("buffer")
    with connect(guarded.url) as client:
        until(lambda: client.exists(Keys("demo").leader), "the buffer to lead")
    buffer.send_signal(signal.SIGTERM)
    buffer.wait(60)

    files = {path.name: path for path in hand.run_dir.iterdir() if path.is_file()}
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in files.items()}
    assert modes == {"config.yaml": 0o600, "redis.json": 0o600}
    assert PASSWORD not in files["config.yaml"].read_text()
    assert PASSWORD not in hand.log("buffer").read_text()


def test_a_worker_does_not_replace_the_runs_configuration_and_nobody_a_launchers(hand: Hand) -> None:
    def keep(steps: int, *, replace: bool) -> int:
        config = load_config(hand.yaml, [f"--directory={hand.folder / 'runs'}", f"--trainer.steps={steps}"], {})
        keep_config(config, hand.yaml, replace=replace)
        return int(yaml.safe_load((hand.run_dir / "config.yaml").read_text())["trainer"]["steps"])

    assert keep(1, replace=False) == 1, "there was none"
    assert keep(2, replace=False) == 1, "a worker's"
    assert keep(3, replace=True) == 3, "a producer's"
    with RunFolder(hand.run_dir).held():
        assert keep(4, replace=True) == 3, "penstock run has it"
    again = load_config(hand.run_dir / "config.yaml", ["--trainer.steps=5"], {})
    keep_config(again, hand.run_dir / "config.yaml", replace=True)
    assert keep(6, replace=False) == 3, "a part of the launcher's"


def test_a_run_that_nobody_started_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"No part of run 'digits' was started under .*runs, .* or give Trainer"):
        Trainer(run="digits")
    with pytest.raises(ConfigError, match=r"There is no configuration run\.yaml"):
        Trainer("run.yaml")


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2 of 2"),
        ({"role": "critic"}, "role 'critic' is not in roles"),
        ({"subscription": {"sise": 3}}, "sise"),
    ],
)
def test_a_mistake_in_a_trainers_arguments_is_told_before_the_wait_for_redis(
    hand: Hand, mistake: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(hand.yaml, **mistake)


def test_a_trainer_whose_redis_refuses_it_says_so_at_once(hand: Hand, guarded: RedisServer) -> None:
    hand.config["redis"] = {"url": guarded.url.replace(PASSWORD, "wrong")}

    with pytest.raises(QueueRefused, match="refuses the password"):
        Trainer(hand.yaml)
