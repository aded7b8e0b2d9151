"""What a Redis refuses, in words."""

import pytest
import redis
from redis.exceptions import ResponseError

from penstock.errors import ProtocolError, QueueUnavailable
from penstock.redis.call import translate
from penstock.redis.refusals import NamingRedis, in_words

WRONG = "WRONGTYPE Operation against a key holding the wrong kind of value"


def refuse(*_: object, **__: object) -> None:
    raise ResponseError(WRONG)


def test_a_client_names_the_key_that_is_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis.Redis, "execute_command", refuse)
    client = NamingRedis()
    with pytest.raises(ResponseError, match=r"^HGETALL 'penstock:\{r\}:subs': WRONGTYPE") as caught:
        client.hgetall("penstock:{r}:subs")
    assert isinstance(told := in_words(caught.value), ProtocolError)
    assert "another type than penstock gives it (HGETALL 'penstock:{r}:subs'" in str(told)
    with pytest.raises(ResponseError, match=r"^WRONGTYPE"):
        client.evalsha("0" * 40, 1, "penstock:{r}:subs")


@pytest.mark.parametrize("said", [WRONG, f"ERR Error running script (call to f_0): @user_script:1: {WRONG}"])
def test_a_verb_that_meets_a_key_of_another_type_is_named(said: str) -> None:
    told = translate(ResponseError(said), "requeue")
    assert str(told).startswith("verb requeue: ")
    assert isinstance(told, ResponseError)
    assert isinstance(in_words(told), ProtocolError)


def test_what_no_longer_answers_is_said_and_no_other_error_is() -> None:
    told = in_words(redis.ConnectionError("Connection closed by server."))
    assert isinstance(told, QueueUnavailable)
    assert "(Connection closed by server): give the command again" in str(told)
    assert in_words(ValueError("x")) is None
