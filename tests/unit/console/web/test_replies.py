"""What became of a request that failed, as a status and a sentence."""

import pytest
from fastapi import FastAPI
from redis.exceptions import ConnectionError, ResponseError
from starlette.testclient import TestClient

from penstock.console.web.replies import explain_errors
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueUnavailable


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConnectionError("refused"), 503, "Redis does not answer: "),
        (ResponseError("WRONGTYPE against a key"), 502, "Redis answers, but not with what penstock keeps there: "),
        (QueueUnavailable("away."), 503, "away."),
        (ProtocolError("no map."), 502, "no map."),
        (ConfigError("no run."), 400, "no run."),
        (PenstockError("else."), 500, "else."),
    ],
    ids=lambda one: type(one).__name__,
)
def test_each_error_has_its_status_and_its_sentence(error: Exception, status: int, words: str) -> None:
    app = FastAPI()
    explain_errors(app)

    def fail() -> None:
        raise error

    app.get("/")(fail)
    found = TestClient(app, raise_server_exceptions=False).get("/")
    assert (found.status_code, words in found.json()["error"]) == (status, True)
