"""Servers that a fleet starts itself: one that does not answer is restarted, and a router gets its engines."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.config import EngineConfig
from penstock.config.fleet import MemberConfig
from penstock.workers.fleet.health import ServerHealth, add_engines
from penstock.workers.fleet.nodes import Node
from penstock.workers.fleet.plan import EngineProcess, plan
from tests.unit.workers.fleet.test_plan import make


@contextmanager
def served(answers: dict[str, Any], posted: list[Any]) -> Iterator[str]:
    """A server that answers these paths, and keeps what is posted."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 503)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(202)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def frozen_engine() -> EngineProcess:
    reward = {"name": "reward", "model_path": "/r", "server_groups": [{"num_engines": 1}]}
    policy = {"name": "policy", "server_groups": [{"num_engines": 1}]}
    config = make(models=[policy, reward])
    return next(one for one in plan(config, [Node("127.0.0.1")]).engines if one.model == "reward")


def until_hangs(health: ServerHealth, server: EngineProcess, pid: int, *, hangs: bool, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while health.hangs(server, pid) != hangs:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_server_hangs_once_it_has_not_answered_for_its_limit() -> None:
    answers: dict[str, Any] = {"/server_info": {}}
    config = EngineConfig(
        start_timeout_s=0.5, load_timeout_s=0.2, health_interval_s=0.01, health_timeout_s=0.05, health_failures=1
    )
    with served(answers, []) as url:
        health, server = ServerHealth(config), replace(frozen_engine(), url=url)
        until_hangs(health, server, 1, hangs=False)
        answers.clear()
        until_hangs(health, server, 1, hangs=True)
        assert not health.hangs(server, 2), "a new process has the time of a start"
        answers["/server_info"] = {}
        until_hangs(health, server, 2, hangs=False)


def test_a_router_gets_the_engines_that_answer() -> None:
    posted: list[Any] = []
    workers = [{"url": "http://127.0.0.1:1/"}]
    with served({"/workers": {"workers": workers}}, posted) as router, served({"/health": {}}, []) as serving:
        members = [MemberConfig(url=url) for url in ("http://127.0.0.1:1", "http://127.0.0.1:2", serving)]
        assert add_engines(router, members, 5.0)
    assert posted == [{"url": serving, "worker_type": "regular"}], "one is known, one does not answer"
    assert not add_engines(router, members, 1.0), "it has ended"
