"""Raw clients run the mix of lengths that the workload has, whichever client sends a prompt."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.engine_rate import WORKLOADS
from benchmarks.raw_clients import raw_clients

CONCURRENCY = 48
LONG = 1024


class Engine(ThreadingHTTPServer):
    """Answers short requests at once and holds long ones."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.held = 0
        self.lock = threading.Lock()
        self.all_held, self.ending = threading.Event(), threading.Event()

    def hold(self) -> None:
        with self.lock:
            self.held += 1
            if self.held == CONCURRENCY:
                self.all_held.set()
        self.ending.wait()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = request["sampling_params"]["max_new_tokens"]
        if length >= LONG:
            self.server.hold()
            self.close_connection = True
            return
        answer = json.dumps({"meta_info": {"output_token_logprobs": [0] * length}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.ending.set()
        server.shutdown()
        thread.join()


def test_long_answers_occupy_requests_of_every_client(engine: Engine) -> None:
    """Long answers accumulate until all requests wait for one, as in a run; no client has short answers only."""
    with raw_clients(f"http://127.0.0.1:{engine.server_port}", [[1]], WORKLOADS["tail"], CONCURRENCY):
        assert engine.all_held.wait(timeout=60), f"{engine.held} of {CONCURRENCY} requests are long answers"
