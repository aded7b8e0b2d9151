"""Programs of answers at a service with SandboxFusion's API, which here runs them without isolation."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from penstock.config import RewardConfig
from penstock.errors import ConfigError
from penstock.workers.rewards.jail import sandbox
from penstock.workers.rewards.jail.detect import find_jail
from penstock.workers.rewards.jail.jail import JailError
from penstock.workers.rewards.jail.task import End, Task
from penstock.workers.rewards.kinds.code import Workshop, code
from penstock.workers.rewards.kinds.kind import Question


class Service(BaseHTTPRequestHandler):
    """``/run_code``: what the service answers, and what it was asked."""

    asked: ClassVar[list[dict[str, Any]]] = []
    #: Statuses of the next answers, before it works.
    statuses: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        status = self.statuses.pop(0) if self.statuses else 200
        data = json.dumps(self.run(body) if status == 200 else {}).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        command = [sys.executable, "-I", "-c", body["code"]]
        try:
            done = subprocess.run(
                command, input=body["stdin"], capture_output=True, text=True, timeout=body["run_timeout"], check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}}
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {"status": "Success", "run_result": result | {"execution_time": time.monotonic() - began}}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sandbox, "_PAUSE_S", 0.0)
    Service.asked.clear()
    Service.statuses.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def reward(url: str, **code_keys: Any) -> RewardConfig:
    jail = {"kind": "sandbox", "url": url, "output_bytes": 1024}
    return RewardConfig.model_validate({"function": "code", "jail": jail, "code": code_keys})


def test_answers_are_scored_by_programs_that_run_there(url: str) -> None:
    config = reward(url)
    workshop = Workshop(config.code, find_jail(config))
    label = json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"})
    right, wrong = (f"```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "+-")
    assert code(Question(right, label), workshop)["score"] == 1.0
    assert code(Question(wrong, label), workshop)["failed"]["why"] == "wrong_output"
    reads = "```python\nprint(int(input()) * 2)\n```"
    assert code(Question(reads, json.dumps({"inputs": ["21"], "outputs": ["42"]})), workshop)["score"] == 1.0
    assert not any("42" in one["stdin"] for one in Service.asked), "the expected result stays here"


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("print(1)", End.DONE),
        ("raise SystemExit(3)", End.FAILED),
        ("1 / 0", End.FAILED),
        ("while True: pass", End.OUT_OF_TIME),
        ("print('x' * 2000)", End.TOO_MUCH_OUTPUT),
        ("print('x' * 2000000)", End.TOO_MUCH_OUTPUT),
        ("import os; os.kill(os.getpid(), 9)", End.KILLED),
    ],
)
def test_each_way_to_end_has_its_name(url: str, program: str, how: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START_S", 0.0 if how is End.OUT_OF_TIME else 60.0)
    ended = find_jail(reward(url)).run(Task(program), test_s=0.5)
    assert ended.how is how
    assert how is not End.FAILED or "ready" not in ended.errors


def test_a_busy_service_is_asked_again_and_one_that_refuses_is_named(url: str) -> None:
    jail = find_jail(reward(url))
    Service.statuses[:] = [503, 429]
    assert jail.run(Task("print(1)")).output == b"1\n"
    assert len(Service.asked) == 3
    for statuses, why in (([400], "refuses programs: status 400"), ([302], "refuses programs: status 302")):
        Service.statuses[:] = statuses
        with pytest.raises(JailError, match=why):
            jail.run(Task("print(1)"))
    Service.statuses[:] = [500] * 4
    with pytest.raises(JailError, match=r"does not answer: .*status 500"):
        jail.run(Task("print(1)"))
    assert jail.describe().startswith("sandbox: the service at http://127.0.0.1")


def test_an_address_and_its_kind_belong_together() -> None:
    for jail in ({"kind": "sandbox"}, {"url": "http://a:1"}, {"kind": "sandbox", "url": "ftp://a"}):
        with pytest.raises((ValueError, ConfigError), match="url"):
            RewardConfig.model_validate({"jail": jail})
