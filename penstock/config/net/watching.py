"""Sections ``metrics``, ``telemetry`` and ``notify``: how a run is monitored."""

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.config.net.addresses import can_be_posted_to, checked_host
from penstock.config.section import Positive, Section

#: An address that lacks its ``http://``; a file of such a name is written ``./NAME``.
_HOST_AND_PORT = re.compile(r"[^/.][^/]*:[0-9]{1,5}(/|\Z)")


class MetricsConfig(Section):
    """Prometheus metrics of every part, each at an address of its own (docs/metrics.md)."""

    #: Address that parts listen on; 0.0.0.0 or :: for every one of their machine. Metrics have no password.
    host: str = "127.0.0.1"
    #: Port of each part: 0 takes a free one, which `penstock metrics discovery` reports to Prometheus; a number is for
    #: a part that is alone on its machine (PENSTOCK_METRICS__PORT sets it for one part). None: no metrics.
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    #: Name or address by which Prometheus reaches a part; None: ``host``, or the machine's name where that means all.
    reached_at: str | None = None

    @field_validator("host", "reached_at")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        return checked_host(host)


class TelemetryConfig(Section):
    """OpenTelemetry: a trace per job over all parts (docs/tracing.md). Needs the extra ``telemetry``."""

    #: Receiver of spans: the http:// or https:// address of an OTLP collector (``http://localhost:4318``), or
    #: the path of a file that gets a span per line. Passwords of a collector are set in the environment
    #: (OTEL_EXPORTER_OTLP_HEADERS). None: no traces.
    traces: str | None = None
    #: Share of the jobs that are traced; all parts choose the same ones.
    share: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("traces")
    @classmethod
    def _can_be_sent_to(cls, traces: str | None) -> str | None:
        if traces == "":
            raise ValueError("telemetry.traces is empty: give an address, the path of a file, or null")
        if traces is None or ("://" not in traces and not _HOST_AND_PORT.match(traces)):
            return traces
        try:
            url = urlsplit(traces)
            fits = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and "@" not in url.netloc
        except ValueError:
            fits = False
        if not fits:
            # It may hold a secret: it is not repeated.
            raise ValueError(
                "telemetry.traces is no address that spans can be sent to: give http://HOST:PORT or "
                "https://HOST:PORT, and a password of the collector in OTEL_EXPORTER_OTLP_HEADERS"
            )
        return traces


class NotifyConfig(Section):
    """A web address that is notified when a run of ``penstock run`` ends: finished, failed or stopped."""

    #: http:// or https:// address that gets a POST of JSON (docs/operations.md); it is masked wherever it is shown.
    #: None: no notification.
    url: str | None = None
    #: Longest time of all attempts together; the end of the run waits no longer for it.
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 10.0
    #: Attempts, with a pause between them.
    max_attempts: Positive = 3

    @model_validator(mode="after")
    def _can_be_posted_to(self) -> Self:
        # A resolved configuration shows only that one is set.
        if self.url is not None and not can_be_posted_to(self.url):
            # It may hold a secret: it is not repeated.
            raise ValueError(
                "notify.url is no address that can be posted to: give http://HOST/PATH or https://HOST/PATH"
            )
        return self
