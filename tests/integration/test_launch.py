"""The launcher: what it starts it keeps up, stops and takes along, whatever happens to whom."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.console.launch.children import STOP_S
from penstock.payloads import servers as payload_servers
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer, read_address

DRIVER = Path(__file__).with_name("launch_driver.py")
PARTS = ("buffer", "trainer", "producer", "worker-0", "worker-1")


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Desk:
    """A folder with a configuration, and the runs started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "policy").mkdir()
        (folder / "policy" / "config.json").write_text("{}")
        (folder / "train.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
        self.settings: dict[str, Any] = {
            "run": "demo",
            "model": {"path": "policy"},
            "data": {"train": [{"name": "t", "path": "train.jsonl"}]},
            "engine": {"url": "http://127.0.0.1:1"},
            "worker": {"count": 2},
            "history": {"enabled": False},
        }
        self.started: list[subprocess.Popen[str]] = []

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "demo"

    def do(self, part: str, what: str) -> None:
        (self.folder / f"{part}.do").write_text(what)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.settings))
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), "run", "run.yaml", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(DRIVER.parents[2]), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def pids(self, part: str) -> list[int]:
        """Of every start: the part, and the child that it has."""
        path = self.folder / f"{part}.pids"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def all_pids(self) -> list[int]:
        return [pid for path in self.folder.glob("*.pids") for pid in self.pids(path.stem)]

    def up(self) -> None:
        until(
            lambda: (
                self.started[-1].poll() is not None
                or (all(self.pids(part) for part in PARTS) and (self.run_dir / "queue.jsonl").exists())
            )
        )
        assert self.started[-1].poll() is None, self.started[-1].communicate()

    def redis_pid(self) -> int:
        log = (self.run_dir / "redis" / "redis.log").read_text()
        starts = [line for line in log.splitlines() if "version=" in line and "pid=" in line]
        return int(starts[-1].rsplit("pid=", 1)[1].split(",")[0])

    def state(self) -> str:
        return str(json.loads((self.run_dir / "run.json").read_text())["state"])

    def nothing_lives(self) -> bool:
        return not any(map(alive, [*self.all_pids(), self.redis_pid()]))

    def killed_after_s(self) -> list[float]:
        """How long the launcher waited for each part that it killed then."""
        log = (self.run_dir / "logs" / "launcher.log").read_text()
        return [float(said) for said in re.findall(r"did not end in ([0-9.]+) s and is killed", log)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
    for pid in made.all_pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in made.started:
        process.communicate(timeout=60)  # what outlives it holds its pipes


def test_a_run_whose_jobs_die_of_user_code_ends_with_the_reason_and_can_go_on(desk: Desk) -> None:
    desk.do("worker-0", "burn")
    code, out, err = desk.run()
    assert code == 1, out + err
    assert "20 of the last 20 jobs of dataset t with reward rewards:f failed because of it" in out + err
    assert "KeyError: 'gone'" in out + err
    assert desk.state() == "failed"

    desk.do("worker-0", "wait")
    desk.do("trainer", "exit 0")
    code, out, err = desk.run("--resume")
    assert code == 0, out + err


def test_user_code_is_imported_before_anything_starts(desk: Desk) -> None:
    (desk.folder / "mine.py").write_text("import sys\nsys.exit(7)\n")
    desk.settings["reward"] = {"function": "mine:score"}
    code, out, err = desk.run()
    assert (code, desk.all_pids()) == (2, []), out + err
    assert "reward.function mine:score cannot be imported: importing mine raised SystemExit: 7" in err
    (desk.folder / "mine.py").write_text("def score(sample): ...\n")
    desk.settings["data"]["train"][0]["environment"] = "mine:World"
    code, out, err = desk.run()
    assert (code, desk.all_pids()) == (2, []), out + err
    assert "data.train.t.environment mine:World cannot be imported" in err


def test_a_worker_that_ends_with_0_without_a_word_died(desk: Desk) -> None:
    desk.do("worker-0", "vanish")
    process = desk.start()
    until(lambda: len(desk.pids("worker-0")) >= 4 or process.poll() is not None)
    assert len(desk.pids("worker-0")) >= 4, "it is started again"
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "worker-0 died 5 times" in out + err) == (1, True), out + err


def test_a_run_ends_when_the_trainer_is_done_and_leaves_its_report(desk: Desk) -> None:
    desk.do("trainer", "exit-when go")
    desk.settings["reward"] = {"pool": {"kind": "rq"}}
    desk.settings["history"] = {"enabled": True}
    process = desk.start()
    desk.up()
    until(lambda: desk.pids("verifiers") and desk.pids("recorder"))
    (desk.folder / "go").touch()
    out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, "")
    assert desk.state() == "finished"
    assert sorted(path.name for path in desk.run_dir.iterdir()) == sorted(
        ["config.yaml", "logs", "queue.jsonl", "redis", "redis.json", "run.json", "summary.json"]
    )
    logs = sorted(path.name for path in (desk.run_dir / "logs").iterdir())
    assert logs == sorted([f"{name}.log" for name in (*PARTS, "launcher", "recorder", "verifiers")])
    assert json.loads((desk.run_dir / "summary.json").read_text())["audit"] == "ok"
    ended = (desk.folder / "ended").read_text().split()
    assert ended[0] == "trainer"
    assert set(ended[-3:-1]) == {"buffer", "verifiers"}, "workers that drain need them"
    assert ended[-1] == "recorder", "it keeps what the others leave"
    assert set(ended) == {*PARTS, "verifiers", "recorder"}
    assert "step" in out
    assert desk.nothing_lives()


def test_a_run_goes_on_without_a_recorder_that_cannot_be_kept_up(desk: Desk) -> None:
    desk.do("trainer", "exit-when go")
    desk.do("recorder", "exit 2")
    desk.settings["history"] = {"enabled": True}
    process = desk.start()
    desk.up()
    log = desk.run_dir / "logs" / "launcher.log"
    until(lambda: "recorder refuses its configuration; continuing without it" in log.read_text())
    (desk.folder / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, desk.state()) == (0, "finished"), out + err


def test_ctrl_c_stops_everything_within_seconds_and_the_run_goes_on_later(desk: Desk) -> None:
    desk.do("trainer", "exit-when go")
    process = desk.start()
    desk.up()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert desk.killed_after_s() == [], "all ended when they were told to"
    assert desk.state() == "stopped"
    assert desk.nothing_lives()

    (desk.folder / "go").touch()
    code, out, _ = desk.run()

    assert code == 0
    assert "unfinished and is resumed; --fresh starts over" in out
    snapshots = [json.loads(line)["step"] for line in (desk.run_dir / "queue.jsonl").read_text().splitlines()]
    assert snapshots == list(range(1, len(snapshots) + 1)), "Redis kept its data"


def test_without_the_trainer_the_run_goes_on_until_it_is_stopped(desk: Desk) -> None:
    desk.do("trainer", "exit 0")
    process = desk.start("--without", "trainer", "--without=worker")
    until(lambda: desk.pids("producer") and desk.pids("buffer") and (desk.run_dir / "queue.jsonl").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (130, "")
    assert 'The trainer is yours: Trainer(run="demo")' in " ".join(out.split())
    assert not desk.pids("trainer")
    assert not desk.pids("worker-0")
    assert desk.state() == "stopped"


def test_each_engine_gets_gpus_of_its_own_behind_the_trainers(desk: Desk) -> None:
    del desk.settings["engine"]
    desk.settings["trainer"] = {"device": "cuda"}
    desk.do("trainer", "exit-when go")
    process = desk.start(CUDA_VISIBLE_DEVICES="4,GPU-x,6", PENSTOCK_TEST_ANY_ENGINE="1")
    desk.up()
    (desk.folder / "go").touch()
    process.communicate(timeout=60)

    said = {part: (desk.run_dir / "logs" / f"{part}.log").read_text() for part in PARTS}
    seen = {part: re.findall(r"'CUDA_VISIBLE_DEVICES': '([^']*)'", text)[0] for part, text in said.items()}
    assert seen["trainer"] == "4,GPU-x,6", "it counts by itself"
    assert (seen["worker-0"], seen["worker-1"]) == ("GPU-x", "6")

    code, _, err = desk.run("--gpus", "2", PENSTOCK_TEST_ANY_ENGINE="1")
    assert code == 2
    assert "takes 2 GPUs; this machine has 2 GPUs, and the trainer takes 1 of them: lower worker.count to 1" in err


def test_a_run_with_a_fleet_starts_it_in_place_of_workers(desk: Desk) -> None:
    del desk.settings["engine"]
    desk.settings["trainer"] = {"device": "cuda"}
    desk.settings["fleet"] = {"models": [{"name": "policy", "server_groups": [{"num_gpus": 2}]}]}
    desk.do("trainer", "exit-when go")
    process = desk.start(CUDA_VISIBLE_DEVICES="4,5,6", PENSTOCK_TEST_ANY_ENGINE="1")
    until(lambda: desk.pids("fleet") and desk.pids("trainer") and (desk.run_dir / "queue.jsonl").exists())
    (desk.folder / "go").touch()
    _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, "")
    assert "'CUDA_VISIBLE_DEVICES': '5,6'" in (desk.run_dir / "logs" / "fleet.log").read_text()
    assert not desk.pids("worker-0")
    ended = (desk.folder / "ended").read_text().split()
    assert ended.index("fleet") < ended.index("buffer"), "workers that drain need it"


def test_ctrl_c_kills_what_does_not_listen(desk: Desk) -> None:
    desk.do("worker-0", "ignore")
    process = desk.start()
    desk.up()
    process.send_signal(signal.SIGINT)
    until(lambda: (desk.folder / "ended").exists())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert 0 < max(desk.killed_after_s()) < STOP_S, "the second one was not waited for"
    assert desk.nothing_lives()


def test_I4_kill_9_of_the_launcher_takes_everything_along_and_the_run_goes_on(desk: Desk) -> None:
    desk.do("trainer", "exit-when go")
    process = desk.start()
    desk.up()
    parts = [desk.pids(part)[0] for part in PARTS]
    process.kill()
    process.communicate()

    until(lambda: not any(map(alive, [*parts, desk.redis_pid()])))
    (desk.folder / "go").touch()
    assert desk.run("--resume")[0] == 0


@pytest.mark.parametrize("part", ["trainer", "worker-1"])
def test_a_part_that_is_killed_is_started_again_and_what_it_left_is_ended(desk: Desk, part: str) -> None:
    desk.do("trainer", "exit-when go")
    process = desk.start()
    desk.up()
    first, left = desk.pids(part)[:2]
    os.kill(first, signal.SIGKILL)

    until(lambda: len(desk.pids(part)) >= 4)
    assert not alive(left)
    (desk.folder / "go").touch()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{part} ended by signal SIGKILL and is started again" in out


def test_redis_that_is_killed_is_back_on_its_port_with_its_data(desk: Desk) -> None:
    desk.do("trainer", "exit-when go")
    process = desk.start()
    desk.up()
    before, url = desk.redis_pid(), read_address(desk.run_dir)
    os.kill(before, signal.SIGKILL)
    until(lambda: desk.redis_pid() != before)
    rows = (desk.run_dir / "queue.jsonl").read_text().count("\n")
    until(lambda: (desk.run_dir / "queue.jsonl").read_text().count("\n") > rows)
    (desk.folder / "go").touch()
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert "Redis died, restarting" in out
    assert read_address(desk.run_dir) == url
    steps = [json.loads(line)["step"] for line in (desk.run_dir / "queue.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_part_that_keeps_dying_stops_the_run_with_its_last_words(desk: Desk) -> None:
    desk.do("producer", "exit 7")
    code, out, _ = desk.run()

    assert code == 1
    assert "producer died 5 times in 60 s, last by exit code 7" in out
    assert "producer says exit" in out
    assert desk.state() == "failed"
    assert desk.nothing_lives()


def test_a_part_that_refuses_its_configuration_is_not_tried_for_long(desk: Desk) -> None:
    desk.do("trainer", "exit 2")
    code, out, _ = desk.run()

    assert code == 1
    assert "trainer refuses its configuration" in out
    assert len(desk.pids("trainer")) == 4


def test_a_worker_that_leaves_is_not_called_back(desk: Desk) -> None:
    desk.do("trainer", "exit-when go")
    process = desk.start()
    desk.up()
    os.kill(desk.pids("worker-1")[0], signal.SIGTERM)
    log = desk.run_dir / "logs" / "launcher.log"
    until(lambda: "worker-1 is done and left" in log.read_text())
    (desk.folder / "go").touch()
    process.communicate(timeout=60)

    assert process.returncode == 0
    assert len(desk.pids("worker-1")) == 2


def test_nobody_starts_a_run_twice_at_once(desk: Desk) -> None:
    desk.start()
    desk.up()
    code, _, err = desk.run()

    assert code == 2
    assert f"Run demo is already running (pid {desk.started[0].pid})" in err


def test_a_finished_run_is_moved_aside_by_the_next(desk: Desk) -> None:
    desk.do("trainer", "exit 0")
    assert desk.run()[0] == 0
    (desk.run_dir / "mark").touch()

    code, out, _ = desk.run()

    assert code == 0
    assert "unfinished" not in out
    assert (desk.folder / "runs" / "demo.prev" / "mark").exists()
    assert not (desk.run_dir / "mark").exists()


def test_fresh_starts_anew_and_resume_needs_a_run(desk: Desk) -> None:
    code, _, err = desk.run("--resume")
    assert (code, "There is no run to resume" in err) == (2, True)
    process = desk.start()
    desk.up()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    desk.do("trainer", "exit 0")

    assert desk.run("--fresh")[0] == 0

    prev = json.loads((desk.folder / "runs" / "demo.prev" / "run.json").read_text())
    assert prev["state"] == "stopped"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"engine": {"python": "/no/python", "args": {"device": "cpu"}}},
            "engine.python: there is no interpreter /no/python",
        ),
        (
            {"engine": {"python": sys.executable, "args": {"device": "cpu"}}},
            "has no sglang; run `penstock engine install`",
        ),
        ({"engine": {"preset": "cuda"}}, "takes 2 GPUs; this machine has no GPU"),
        ({"prepare": ["absent.py"]}, "prepare: there is no script"),
        ({"prepare": ["broken.py"]}, "no luck today"),
        ({"model": {"path": "absent"}}, "model.path:"),
        ({"data": {"train": [{"name": "t", "path": "absent.jsonl"}]}}, "data.train.0.path: there is no file"),
        ({"redis": {"url": "redis://127.0.0.1:1"}}, "No Redis answers at redis://127.0.0.1:1"),
    ],
)
def test_a_start_that_fails_is_one_sentence_and_leaves_nothing(desk: Desk, change: dict[str, Any], said: str) -> None:
    (desk.folder / "broken.py").write_text("raise SystemExit('no luck today')")
    desk.settings |= change

    code, _, err = desk.run()

    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not desk.run_dir.exists()
    assert not desk.all_pids()


def test_a_start_that_fails_puts_the_run_before_back(desk: Desk) -> None:
    desk.do("trainer", "exit 0")
    assert desk.run()[0] == 0
    (desk.run_dir / "mark").touch()
    desk.settings["prepare"] = ["broken.py"]
    (desk.folder / "broken.py").write_text("raise SystemExit(1)")

    assert desk.run("--fresh")[0] == 2

    assert (desk.run_dir / "mark").exists()


def test_prepare_makes_what_the_run_needs_in_the_scripts_folder(desk: Desk) -> None:
    (desk.folder / "make").mkdir()
    (desk.folder / "make" / "it.py").write_text(
        'import sys; open(sys.argv[1], \'w\').write(\'{"prompt": "p", "label": "l"}\'); print(\'made\', sys.argv[1])'
    )
    desk.settings |= {"prepare": ["make/it.py", "data.jsonl"]}
    desk.settings["data"] = {"train": [{"name": "t", "path": "make/data.jsonl"}]}
    desk.do("trainer", "exit 0")

    code, out, _ = desk.run()

    assert code == 0
    assert "made data.jsonl" in out


def test_ctrl_c_while_preparing_leaves_nothing(desk: Desk) -> None:
    desk.settings["prepare"] = ["slow.py"]
    (desk.folder / "slow.py").write_text("import time; open('begun', 'w').close(); time.sleep(600)")
    process = desk.start()
    until(lambda: (desk.folder / "begun").exists())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert not desk.run_dir.exists()


def test_the_password_of_a_given_redis_reaches_the_parts_and_no_file(desk: Desk) -> None:
    server = RedisServer(desk.folder / "own", password="hush")
    try:
        desk.settings["redis"] = {"url": server.start()}
        desk.settings["worker"]["slots"] = 3
        desk.do("trainer", "exit 0")
        (desk.folder / "producer.do").write_text("wait")
        code, out, err = desk.run("--worker.slots=5", PENSTOCK_WORKER__SLOTS="4")

        assert code == 0
        said = (desk.run_dir / "logs" / "trainer.log").read_text()
        assert server.url in said
        assert "PENSTOCK_WORKER__SLOTS" not in said, "the argument won over it"
        assert "hush" not in out + err + (desk.run_dir / "config.yaml").read_text()
        assert "slots: 5" in (desk.run_dir / "config.yaml").read_text()
        assert server.alive()
        assert not (desk.run_dir / "redis").exists()
    finally:
        server.kill()


def test_keys_of_an_unknown_run_are_not_touched(desk: Desk) -> None:
    import redis

    server = RedisServer(desk.folder / "own")
    try:
        desk.settings["redis"] = {"url": server.start()}
        client = redis.Redis(port=server.port)
        client.set("penstock:{demo}:clock", 1)
        desk.do("trainer", "exit 0")

        code, _, err = desk.run()
        assert (code, "Redis already holds a run demo" in err) == (2, True)
        assert client.exists("penstock:{demo}:clock")

        assert desk.run("--fresh")[0] == 0
        assert not client.exists("penstock:{demo}:clock")
    finally:
        server.kill()


def test_a_run_of_another_schema_does_not_go_on(desk: Desk) -> None:
    import redis

    server = RedisServer(desk.folder / "own")
    try:
        desk.settings["redis"] = {"url": server.start()}
        process = desk.start()
        desk.up()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        client = redis.Redis(port=server.port)
        client.set("penstock:{demo}:schema", 9)

        code, _, err = desk.run("--resume")
        assert (code, "The records of run demo are of schema 9" in err) == (2, True)
        assert client.get("penstock:{demo}:schema") == b"9"

        desk.do("trainer", "exit 0")
        assert desk.run("--fresh")[0] == 0
    finally:
        server.kill()


def test_fresh_deletes_on_no_server_that_only_redis_names(desk: Desk) -> None:
    """Who can write to Redis must not choose what is deleted."""
    import redis

    server, theirs = RedisServer(desk.folder / "own"), RedisServer(desk.folder / "theirs")
    payload = Keys("demo").payload("d/0/1/0", "t")
    try:
        desk.settings["redis"] = {"url": server.start()}
        elsewhere = redis.Redis.from_url(theirs.start())
        elsewhere.set(payload, b"x")
        payload_servers.add(redis.Redis(port=server.port), Keys("demo"), "p2", theirs.url)
        desk.do("trainer", "exit 0")

        code, out, err = desk.run("--fresh")

        assert (code, "payload server p2 is not in redis.payload_servers" in out + err) == (0, True)
        assert elsewhere.get(payload) == b"x"
    finally:
        theirs.kill()
        server.kill()


def test_a_reader_that_leaves_stops_the_run_which_can_go_on(desk: Desk) -> None:
    process = desk.start()
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(timeout=60)

    assert (process.returncode, err) == (141, "")
    assert desk.state() == "stopped"
    until(desk.nothing_lives)


@pytest.mark.parametrize("place", ["/sys/penstock", "run.yaml/runs"])
def test_a_folder_that_cannot_be_written_is_one_sentence(desk: Desk, place: str) -> None:
    code, out, err = desk.run(f"--directory={place}")

    assert (code, out) == (2, "")
    assert err.startswith(f"penstock: directory: {desk.folder / place} cannot be written (")
    assert err.count("\n") == 1
    assert not desk.all_pids()


def test_an_error_of_the_launcher_itself_leaves_no_run_that_runs(desk: Desk) -> None:
    process = desk.start()
    desk.up()
    (desk.run_dir / "queue.jsonl").unlink()
    (desk.run_dir / "queue.jsonl").mkdir()
    process.communicate(timeout=60)

    assert process.returncode != 0
    assert desk.state() == "failed"
    until(desk.nothing_lives)
