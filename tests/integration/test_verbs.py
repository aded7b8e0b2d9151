"""Every verb as people use it, without --json, on a run that trains, evaluates and asks as the digits example does."""

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
import typer

from penstock.config import Config
from penstock.console.cli import main as cli
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.subscription.evaluation_reader import NAME, definition
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.causes import GateClosed
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import buffering, make_config, publish, wait_record

#: Verbs that are parts of a run, or start one; other tests start them.
PARTS = {
    "run",
    "prepare",
    "redis",
    "producer",
    "worker",
    "buffer serve",
    "verifiers",
    "trainer",
    "recorder",
    "serve",
    "fleet up",
    "web",
    # They write files, and have tests of their own.
    "init",
    "engine install",
}


class Engine(BaseHTTPRequestHandler):
    """Answers /weights_checker as its server's ``answer`` says: (status, body)."""

    def do_POST(self) -> None:
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def engines() -> Iterator[list[ThreadingHTTPServer]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in range(2)]
    for server in servers:
        server.answer = (200, {"success": True, "message": "done", "per_engine_checksum": "abc"})  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


Said = tuple[int, str, str]
Verb = Callable[..., Said]


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    data = {"eval": [{"name": "heldout", "path": "h.jsonl"}]}
    # Nobody renews the leases of the test, however long it takes.
    return make_config(redis_server.url, keys.run, tmp_path, data=data, worker={"lease_s": 3600.0})


@pytest.fixture
def verb(
    config: Config,
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    engines: list[ThreadingHTTPServer],
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Verb]:
    """A trainer, its evaluation, its own questions; jobs in several states; two workers, one that waits."""
    evaluation = Subscriber(redis_server.url, keys, NAME)
    with buffering(config), Trainer(config) as trainer, Requests(config, lane="eval"):
        evaluation.join()
        evaluation.define(definition(4))
        publish(trainer)
        play.admit(client, keys, [play.job(i) for i in range(4)])
        ready, buried, _ = play.lease(client, keys, "w1", most=3, version=1)
        play.commit(client, keys, ready, [0, 1], version=1)
        run(client, scripts.fail(keys, buried.job, buried.token, "w1", reason="reward_raised", detail="E: [/x] no",
                                 max_attempts=0, retry_ms=1))  # fmt: skip
        now = float(client.time()[0]) + 600  # it stays there for as long as the test looks
        for index, server in enumerate(engines):
            url = f"http://127.0.0.1:{server.server_address[1]}"
            record = {"name": f"worker-{index}", "at": now, "url": url, "engine": "sglang 0.5.20", "version": 1,
                      "state": "running", "held": 1, "running": 2, "slots": 64, "tokens_per_s": 10.5}  # fmt: skip
            client.hset(keys.workers, f"worker-{index}", pack(record))
        client.hset(keys.waits, "producer", wait_record(GateClosed("actor", 4, 4), now - 5, now))

        def say(*arguments: str) -> Said:
            capsys.readouterr()
            # As a user types it: the target may stand anywhere.
            code = cli.execute([*arguments, "--run", keys.run, "--redis", redis_server.url])
            return (code, *capsys.readouterr())

        yield say
        evaluation.leave()


def names(app: Any, path: str = "") -> Iterator[str]:
    for name, command in app.commands.items():
        if hasattr(command, "commands"):
            yield from names(command, f"{path}{name} ")
        else:
            yield path + name


#: Verb with its arguments -> exit code and words that it says, on stdout where it is done and else on stderr.
VERBS: dict[str, tuple[int, list[str]]] = {
    "status": (0, ["async, bound 1, version 1", "worker-1", "actor", "eval", "requests", "staleness limit"]),
    "why": (0, ["producer has waited", "staleness limit"]),
    "audit": (0, ["ok"]),
    "doctor": (1, ["redis appendonly: yes", "clock of worker worker-0", "weights of policy: ", " errors, "]),
    "metrics discovery": (0, ["["]),
    "top": (2, ["needs a terminal"]),
    "jobs ls": (0, ["d/0/0", "d/0/3", "leased"]),
    "jobs show d/0/2": (0, ["state: leased", "prompt: p2"]),
    "peek": (0, ["d/0/3", "train"]),
    "pause train": (0, ["lane train is paused"]),
    "resume train": (0, ["lane train is resumed"]),
    "buffer ls": (0, ["d/0/0", "actor", "staleness"]),
    "trainers ls": (0, ["actor", "running"]),
    "data ls": (0, ["datasets with a curriculum"]),
    "data show d/0": (2, ["Nothing was counted of prompt d/0"]),
    "weights ls": (0, ["1-0", "policy", "newest"]),
    "jobs cancel d/0/3": (0, ["d/0/3: cancelled, it was queued"]),
    "samples ls": (0, ["d/0/0/0", "d/0/0/1"]),
    "samples show d/0/0/0": (0, ["d/0/0/0"]),
    "trace d/0/0": (0, ["state: ready", "try 1, from lane train", "committed"]),
    "trace d/0/1": (0, ["failed reward_raised", "dead"]),
    "trace d/7/7": (2, ["knows nothing of 'd/7/7'"]),
    "eval ls": (0, ["evaluation"]),
    "eval show heldout": (2, ["invalid prompt"]),
    "export /dev/null": (2, ["/dev/null exists already"]),
    "dead ls": (0, ["d/0/1", "reward_raised", "E: [/x] no"]),
    "dead show d/0/1": (0, ["prompt", "E: [/x] no"]),
    "dead requeue d/0/1": (0, ["1 jobs are queued again"]),
    "dead purge d/0/1": (2, ["Job 'd/0/1' is not a dead letter"]),
    "workers show worker-0": (0, ["engine: sglang 0.5.20"]),
    "workers ls": (0, ["worker-0", "sglang 0.5.20"]),
    "subs ls": (0, ["actor", "eval", "requests", "groups", "running"]),
    "subs set actor size=3": (0, ["size 3"]),
    "subs drop eval": (0, ["subscription eval is dropped"]),
    "engines check": (0, ["worker-0", "abc"]),
    "engines offload --timeout 0.1": (1, ["did not follow the request to change memory in 0.1 s"]),
    "engines onload": (1, ["Worker worker-"]),
    "payloads ls": (0, ["Payloads go to the control Redis."]),
    "payloads add p2 redis://127.0.0.1:1/0": (2, ["No Redis answers at redis://127.0.0.1:1/0"]),
    "payloads drain p2": (2, ["p2"]),
    "payloads lose p2": (2, ["p2"]),
    "fleet ls": (2, ["No fleet of run", "penstock fleet up"]),
    "fleet scale 2": (2, ["No fleet of run"]),
    "fleet engines worker-0": (2, ["There is no worker 'worker-0' with a router"]),
}


def test_every_verb_says_what_it_should(verb: Verb) -> None:
    verb("why")
    there = {name for name in names(typer.main.get_command(cli.app)) if name not in PARTS}
    told = {name for name in there if any(f"{line} ".startswith(f"{name} ") for line in VERBS)}
    of_their_own = {"fleet plan", "check", "reward try"}  # no run: they have tests of their own
    assert there - told == of_their_own, "a verb that nobody tries"
    for line, (code, words) in VERBS.items():
        arguments = [*line.split(), *(["--timeout", "0.1"] if line == "engines onload" else [])]

        found, out, err = verb(*arguments)

        assert found == code, (line, out, err)
        said = err if code == 2 else out + err
        for word in words:
            assert word in said, (line, out, err)
        assert code == 0 or err.count("\n") == 1, (line, err)


def test_a_subscription_of_questions_can_be_changed_where_that_breaks_no_question(verb: Verb) -> None:
    for name in ("requests", "eval"):
        code, out, err = verb("subs", "set", name, "keep_s=60")
        assert (code, err) == (0, "")
        assert "keep_s 60" in out
        code, out, err = verb("subs", "set", name, "size=3")
        assert (code, out) == (2, "")
        assert "takes what its trainer asks for, cannot change" in err
    assert "requests" in verb("subs", "ls")[1]


@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        ((200, {"success": True, "per_engine_checksum": "abc"}), 0, ""),
        ((200, {"success": True, "per_engine_checksum": "abd"}), 1, "serve different weights: restart their workers"),
        (
            (400, {"success": False, "message": "Traceback\n  line\nValueError: no checksum on CPU."}),
            1,
            "1 of 2 engines gave no checksum, so not all were compared. The engine of worker",
        ),
        ((200, [1]), 1, "did not checksum its weights: [1]."),
    ],
)
def test_engines_check_fails_unless_all_were_compared_and_agree(
    verb: Verb, engines: list[ThreadingHTTPServer], second: Any, code: int, said: str
) -> None:
    engines[1].answer = second  # type: ignore[attr-defined]

    found, out, err = verb("engines", "check")

    assert found == code, (out, err)
    assert said in err
    assert "{" not in out
    if second[0] == 400:
        assert "ValueError: no checksum on CPU" in out


def test_on_a_terminal_of_80_columns_no_job_id_is_cut(
    verb: Verb, redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    long = "a-dataset-with-a-rather-long-name-that-tells-what-it-holds"
    play.admit(client, keys, [play.job(1234567, dataset=long, epoch=12)], source="other")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "jobs", "ls", "--run", keys.run, "--redis", redis_server.url],
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        cwd=Path(cli.__file__).resolve().parents[2],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)

    assert process.wait(60) == 0
    assert f"{long}/12/1234567".encode() in shown
    assert "…".encode() not in shown


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # Linux: the other side is closed
        return b""
