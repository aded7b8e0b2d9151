"""The key of an episode: names a sample in clear and is signed with the run's token, so it is stored nowhere."""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from penstock.errors import EpisodeKeyInvalid
from penstock.names import MAX_ANSWERS

#: Most characters of a key, of the job's id and of the nonce.
MAX_KEY = 1024
MAX_JOB = 256
MAX_NONCE = 64

_PREFIX = "pk-"
#: Keeps these signatures apart from any other use of the token.
_DOMAIN = b"penstock episode key 1\0"


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Content of a key: an attempt of sample ``k`` of a job."""

    job: str
    k: int
    #: Attempt of the sample, from 0.
    attempt: int
    #: Random text, so that no key can be issued twice.
    nonce: str

    @property
    def sample(self) -> str:
        """Return the id of the sample."""
        return f"{self.job}/{self.k}"


def make_key(token: str, job: str, k: int, attempt: int, nonce: str) -> str:
    """Return the key of an episode, signed with the run's token."""
    payload = _encode(json.dumps([job, k, attempt, nonce], separators=(",", ":")).encode())
    return f"{_PREFIX}{payload}.{_signature(token, payload)}"


def read_key(token: str, text: str) -> EpisodeKey:
    """Return the content of a key.

    Raises:
        EpisodeKeyInvalid: it is malformed, or was not signed with this token.
    """
    payload, dot, signature = text.removeprefix(_PREFIX).partition(".")
    if len(text) > MAX_KEY or not text.startswith(_PREFIX) or not dot or not text.isascii():
        raise EpisodeKeyInvalid
    if not hmac.compare_digest(signature, _signature(token, payload)):
        raise EpisodeKeyInvalid
    return _parse(payload)


def key_digest(text: str) -> str:
    """Return the short hash by which logs name a key."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:12]


def _parse(payload: str) -> EpisodeKey:
    """Return the content of a key whose signature is right; another version of penstock may have written it."""
    try:
        fields: Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        job, k, attempt, nonce = fields
    except (ValueError, TypeError) as exc:
        raise EpisodeKeyInvalid from exc
    are_texts = isinstance(job, str) and isinstance(nonce, str)
    are_numbers = type(k) is int and type(attempt) is int
    if not (are_texts and are_numbers and 0 < len(job) <= MAX_JOB and len(nonce) <= MAX_NONCE):
        raise EpisodeKeyInvalid
    if not (0 <= k < MAX_ANSWERS and 0 <= attempt < 2**53):
        raise EpisodeKeyInvalid
    return EpisodeKey(job, k, attempt, nonce)


def _signature(token: str, payload: str) -> str:
    return _encode(hmac.digest(token.encode(), _DOMAIN + payload.encode(), "sha256"))


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
