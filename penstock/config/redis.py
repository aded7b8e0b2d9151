"""Section ``redis``: the control Redis, and the payload servers."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from penstock.config import sentinel
from penstock.config.section import Section
from penstock.text import MASK


def check_url(url: str) -> str:
    """Return ``url`` if it may be the address of a Redis, else raise ValueError."""
    if f":{MASK}@" in url or f"password={MASK}" in url.lower():
        raise ValueError(
            "has a masked password; set the real URL, for instance by PENSTOCK_REDIS__URL, or null for the run's own "
            "server"
        )
    if sentinel.is_sentinel(url):
        sentinel.parse(url)
    elif not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("is not the address of a Redis: write redis://[:PASSWORD@]HOST:PORT/DB")
    return url


RedisUrl = Annotated[str, AfterValidator(check_url)]


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:  # several addresses of sentinels
        return None


class RedisConfig(Section):
    """The control Redis and the payload servers."""

    #: URL of the control Redis: redis://[:password@]host:port/db, or
    #: redis+sentinel://[:password@]host:port,host:port/NAME. None: start a server in the run's folder.
    url: RedisUrl | None = None
    #: Port of penstock's own server; 0: a free port. If ``url`` is set, ``port`` must be unset or equal to the port of
    #: ``url``.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: When to sync the append-only file of penstock's own server: every second, by the process that started the server,
    #: or before each reply.
    appendfsync: Literal["everysec", "always"] = "everysec"
    #: Refuse a control Redis without an append-only file, because all data is lost when it dies.
    require_aof: bool = True
    #: URLs of payload servers by name (redis://...). Empty: payloads are stored on the control Redis, under the name
    #: "control".
    payload_servers: dict[str, RedisUrl] = Field(default_factory=dict)
    #: Time in seconds after which a payload server that does not respond to the buffer counts as lost, as after
    #: ``penstock payloads lose``: its samples become rows with mask 0. None: never.
    payload_patience_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check_port(self) -> Self:
        # A url with the same port is allowed: one file may configure the server and its clients.
        if self.url is not None and self.port not in (0, _port_of(self.url)):
            raise ValueError(
                f"port {self.port} is for a server that penstock starts, but url names another one: remove port or url"
            )
        return self
