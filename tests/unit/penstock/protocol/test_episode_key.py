"""Keys of episodes: read by any process with the run's token, and by no other."""

import base64
import json
import pickle

import pytest

from penstock.errors import EpisodeKeyInvalid
from penstock.protocol.episode_key import MAX_KEY, EpisodeKey, _signature, key_digest, make_key, read_key

TOKEN = "t" * 32
KEY = make_key(TOKEN, "math/0/17", 3, 1, "nonce")


def signed(payload: bytes) -> str:
    """Return a key with any payload, signed rightly."""
    text = base64.urlsafe_b64encode(payload).decode().rstrip("=")
    return f"pk-{text}.{_signature(TOKEN, text)}"


def test_a_key_is_read_back() -> None:
    key = read_key(TOKEN, KEY)

    assert key == EpisodeKey("math/0/17", 3, 1, "nonce")
    assert key.sample == "math/0/17/3"


def test_the_longest_job_id_fits() -> None:
    job = f"{'d' * 64}/{2**62}/{2**62}"

    assert read_key(TOKEN, make_key(TOKEN, job, 65535, 2**52, "n" * 64)).job == job


def test_a_key_of_another_run_is_refused() -> None:
    with pytest.raises(EpisodeKeyInvalid, match="POST /v1/episodes"):
        read_key("u" * 32, KEY)


@pytest.mark.parametrize("at", range(0, len(KEY), 5))
def test_a_changed_key_is_refused(at: int) -> None:
    other = KEY[:at] + ("A" if KEY[at] != "A" else "B") + KEY[at + 1 :]

    with pytest.raises(EpisodeKeyInvalid):
        read_key(TOKEN, other)


@pytest.mark.parametrize(
    "text",
    ["", "pk-", "pk-.", "pk-a.b", KEY[3:], KEY + "=", KEY + ".", KEY + "x", "ä", "pk-ä.ö", "\udcff", "x" * MAX_KEY * 9],
)
def test_malformed_keys_are_refused(text: str) -> None:
    with pytest.raises(EpisodeKeyInvalid):
        read_key(TOKEN, text)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        3,
        {},
        [],
        ["job", 0, 0],
        ["job", 0, 0, "n", 1],
        ["", 0, 0, "n"],
        ["j" * 300, 0, 0, "n"],
        ["job", True, 0, "n"],
        ["job", -1, 0, "n"],
        ["job", 65536, 0, "n"],
        ["job", 0, 1e3, "n"],
        ["job", 0, 2**80, "n"],
        ["job", 0, 0, 7],
        ["job", 0, 0, "n" * 65],
    ],
)
def test_signed_content_that_no_key_has_is_refused(fields: object) -> None:
    with pytest.raises(EpisodeKeyInvalid):
        read_key(TOKEN, signed(json.dumps(fields).encode()))


def test_signed_bytes_that_are_no_json_are_refused() -> None:
    with pytest.raises(EpisodeKeyInvalid):
        read_key(TOKEN, signed(b"\xff\xfe["))


def test_logs_name_a_key_by_a_hash_that_does_not_contain_it() -> None:
    assert key_digest(KEY) == key_digest(KEY)
    assert key_digest(KEY) != key_digest(KEY + "x")
    assert len(key_digest("\udcff")) == 12
    assert key_digest(KEY) not in KEY


def test_the_error_survives_pickling() -> None:
    assert "POST /v1/episodes" in str(pickle.loads(pickle.dumps(EpisodeKeyInvalid())))
