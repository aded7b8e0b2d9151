"""A web address is told of the end of a run, and never holds it up."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.load import load_config, save_resolved, secret_environment
from penstock.config.serving import NotifyConfig
from penstock.console.launch.notify import check_notify, message, notify
from penstock.errors import ConfigError
from penstock.system.run_folder import RunRecord

#: Longest wait of a notification that is to be ended by its own limit, on a machine of any load.
PATIENCE_S = 60.0


class Hook:
    """A web server on loopback: what it was sent, and what it answers."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        #: Answers in turn; the last one again and again.
        self.answers = [200]
        self.location = ""
        self.held = threading.Event()
        self.held.set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hook/secret-path"

    def _handler(hook) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                hook.held.wait(PATIENCE_S)
                self.send_response(hook.answers.pop(0) if len(hook.answers) > 1 else hook.answers[0])
                if hook.location:
                    self.send_header("Location", hook.location)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler


@pytest.fixture
def make_hook() -> Iterator[Callable[[], Hook]]:
    made: list[Hook] = []

    def make() -> Hook:
        made.append(Hook())
        return made[-1]

    yield make
    for hook in made:
        hook.held.set()
        hook.server.shutdown()
        hook.server.server_close()


@pytest.fixture
def hook(make_hook: Callable[[], Hook]) -> Hook:
    return make_hook()


def config(tmp_path: Path, url: str) -> Config:
    (tmp_path / "run.yaml").write_text(
        "run: digits\nmodel: {path: model}\ndata: {train: [{name: d, path: d.jsonl}]}\n"
        f"redis: {{url: 'redis://:hunter22@h:1/0'}}\nnotify: {{url: '{url}'}}\n"
    )
    return load_config(tmp_path / "run.yaml", [], {})


@pytest.fixture(autouse=True)
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.console.launch.notify.TIMEOUT_S", PATIENCE_S)


def told(url: str) -> None:
    notify(NotifyConfig(url=url), {"run": "digits"})


def test_the_end_is_posted_with_its_reason_and_summary_and_without_secrets(tmp_path: Path, hook: Hook) -> None:
    made = config(tmp_path, hook.url)
    record = RunRecord("failed", 1.0, 2.0, f"worker died; redis://:hunter22@h:1/0 and {hook.url} were there")

    notify(made.notify, message(made, record, {"steps": 3, "audit": "hunter22"}))

    (body,) = hook.bodies
    assert (body["run"], body["state"], body["summary"]["steps"]) == ("digits", "failed", 3)
    assert body["text"].startswith("penstock: run digits has failed: worker died")
    assert "hunter22" not in json.dumps(body)
    assert "secret-path" not in json.dumps(body)


def test_an_answer_of_5xx_is_tried_again(hook: Hook) -> None:
    hook.answers = [503, 200]

    told(hook.url)

    assert len(hook.bodies) == 2


@pytest.mark.parametrize(("answer", "tries"), [(500, 3), (404, 1)])
def test_what_is_not_taken_is_told_once_without_the_address(
    hook: Hook, caplog: pytest.LogCaptureFixture, answer: int, tries: int
) -> None:
    hook.answers = [answer]

    told(hook.url)

    assert len(hook.bodies) == tries
    assert f"it answered {answer}" in caplog.text
    assert "secret-path" not in caplog.text


def test_redirects_are_refused(make_hook: Callable[[], Hook], caplog: pytest.LogCaptureFixture) -> None:
    first, other = make_hook(), make_hook()
    first.answers, first.location = [307], other.url

    told(first.url)

    assert other.bodies == []
    assert "redirects are not followed" in caplog.text


def test_one_that_never_answers_holds_nobody_up(
    hook: Hook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.console.launch.notify.TIMEOUT_S", 0.5)
    monkeypatch.setattr("penstock.console.launch.notify.ATTEMPTS", 100)
    hook.held.clear()
    began = time.monotonic()

    with caplog.at_level(logging.WARNING):
        told(hook.url)

    assert time.monotonic() - began < PATIENCE_S / 2
    assert "failed to post the end of the run" in caplog.text


def test_nobody_who_cannot_be_reached_ends_a_run(caplog: pytest.LogCaptureFixture) -> None:
    told("http://127.0.0.1:1/x")

    assert "failed to post the end of the run" in caplog.text


def test_the_address_is_masked_in_what_is_saved_and_goes_to_no_child(tmp_path: Path) -> None:
    made = config(tmp_path, "https://chat.example/hook/T0KEN")

    save_resolved(made, tmp_path / "saved.yaml")

    assert "T0KEN" not in (tmp_path / "saved.yaml").read_text()
    assert "T0KEN" not in json.dumps(secret_environment(made))
    again = load_config(tmp_path / "saved.yaml", [], secret_environment(made))
    with pytest.raises(ConfigError, match=r"notify\.url is masked in this file: give it again"):
        check_notify(again)


@pytest.mark.parametrize("url", ["ftp://h/s3cret", "file:///s3cret", "h/s3cret", "http:///s3cret", "http://[s3cret"])
def test_what_cannot_be_posted_to_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"notify\.url is not an HTTP address") as said:
        config(tmp_path, url)
    assert "s3cret" not in str(said.value)
