"""Section ``serving``: weights over HTTP."""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.net.addresses import checked_host
from penstock.config.section import Positive, Seconds, Section
from penstock.redaction import MASK

_TOKEN = re.compile("[!-~]{16,256}")


def is_token(token: str) -> bool:
    """Return whether this is a valid token for fetching weights."""
    return _TOKEN.fullmatch(token) is not None


class ServingConfig(Section):
    """Weights over HTTP, for workers that do not see the trainer's folder: the trainer serves published versions, and
    workers fetch them from it and from one another (docs/consumers.md)."""

    #: Serve and fetch; false: workers must see the folder of published versions.
    enabled: bool = False
    #: Token that clients need: printable characters without blanks, in PENSTOCK_SERVING__TOKEN rather than in a
    #: file; it is masked wherever it is shown. None: a random one, created once for the run in the file
    #: ``weights.token`` of its folder, readable by its user alone.
    token: str | None = None
    #: Address that trainer and workers listen on; 0.0.0.0 or :: for every one of their machine.
    host: str = "127.0.0.1"
    #: Port of each of them: 0 takes a free one; a number is for a part that is alone on its machine.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Name or address by which workers of other machines reach a part; None: ``host``, or the machine's name if that
    #: means all.
    reached_at: str | None = None
    #: Most open connections of a part; if all have shown the token one more is closed at once, and its client
    #: tries another part, else the oldest without the token is closed.
    max_connections: Annotated[int, Field(gt=0, le=4096)] = 32
    #: A connection without progress for so long is closed, by either side.
    stall_s: Seconds = 20.0
    #: Least bytes of a range, in which files are fetched and verified; a version has at most 4,096, so those of a large
    #: one are larger.
    range_bytes: Annotated[int, Field(ge=64 * 1024, le=1024**3)] = 4 * 1024**2
    #: Ranges that a worker fetches at once.
    fetches: Annotated[int, Field(gt=0, le=64)] = 4
    #: Folder of fetched versions; the workers of one machine share it. None: ``fetched`` in the run's folder. With
    #: transport delta what is fetched is in ``worker.copies_dir``.
    folder: Path | None = None
    #: Most bytes of fetched versions on a machine: the oldest is deleted first, but none that a worker uses. A version
    #: that does not fit beside these is refused. With transport delta ``worker.copies_bytes`` bounds them.
    max_bytes: Positive = 1024**4
    #: Certificate (PEM, with its chain) and key by which parts serve TLS; null: plain HTTP.
    tls_cert: Path | None = None
    #: See ``tls_cert``.
    tls_key: Path | None = None
    #: Certificates (PEM) for verifying those of other parts; null: those of the machine.
    tls_ca: Path | None = None

    @field_validator("token")
    @classmethod
    def _is_a_token(cls, token: str | None) -> str | None:
        # A resolved configuration shows only that one is set.
        if token not in (None, MASK) and not is_token(token or ""):
            # It is secret: it is not repeated.
            raise ValueError("serving.token is no token: give 16 to 256 printable characters of ASCII, without blanks")
        return token

    @field_validator("host", "reached_at")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        return checked_host(host)

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or neither")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_ca verifies certificates, and without tls_cert no part has one: set it, or remove tls_ca"
            )
        return self

    @model_validator(mode="after")
    def _is_enabled(self) -> Self:
        # A token may stand in the environment of a whole machine.
        given = sorted(key for key in self.model_fields_set - {"token", "enabled"} if not self.is_default(key))
        if given and "enabled" not in self.model_fields_set:
            raise ValueError(
                f"{', '.join(given)} {'say' if given[1:] else 'says'} how weights are served, and enabled is not set: "
                f"set it true, or false to keep {'them' if given[1:] else 'it'} for later"
            )
        return self

    @property
    def is_tls(self) -> bool:
        return self.tls_cert is not None
