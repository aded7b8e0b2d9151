"""Spans of jobs for OpenTelemetry, if ``telemetry.traces`` is set.

A job is one trace: its id is derived from the run and the job, and the id of a span from its subject, so that every
process knows both without sending them along.

    job                       producer: as it was admitted
    ├ attempt                 worker: one lease
    │ ├ generate              of a sample, at the engine
    │ ├ reward
    │ └ commit
    ├ cut                     buffer: from when it took the group in
    └ train                   trainer: from when the batch was handed out to its commit

Ended spans are sent by a thread; beyond ``MAX_QUEUED`` the oldest are dropped. No process waits for it.
"""

import logging
import os
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote

from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.text import format_exc, know, redact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from penstock.config import Config

log = logging.getLogger(__name__)

#: Most queued spans, and spans per message; seconds between messages, and time limits of one, and of the last ones.
MAX_QUEUED, MAX_SENT, EVERY_S, TIMEOUT_S, CLOSE_S = 8192, 512, 1.0, 3.0, 5.0
#: Most bytes of a file of spans, by all its writers.
MAX_FILE_BYTES = 2 * 1024**3
#: Times are nanoseconds of 64 bits: up to the year 2262.
_MAX_TIME_S = 9.2e9
#: Parent of top-level spans.
ROOT = "job"

Value = str | int | float | bool


class Spans(Protocol):
    """Receives the spans of a process. Thread-safe."""

    def add(
        self, job: str, name: str, begin_s: float, end_s: float, *, of: str = "", under: str = ROOT, **about: Value
    ) -> None:
        """Add a span of a job; return at once, without exceptions.

        Args:
            begin_s, end_s: Unix seconds. A span with an invalid time (NaN, infinite, before 1970) is dropped.
            of: its subject, if a job has several of this name: a lease's token, a sample.
            under: ``name_of`` its parent span.
            about: its attributes.
        """

    def close(self) -> None:
        """Send queued spans. Blocks for at most ``CLOSE_S``."""


class NoSpans:
    """Spans without a receiver, if traces are off."""

    def add(
        self, job: str, name: str, begin_s: float, end_s: float, *, of: str = "", under: str = ROOT, **about: Value
    ) -> None:
        """Nothing."""

    def close(self) -> None:
        """Do nothing."""


def name_of(name: str, of: str) -> str:
    """Return the name of a span as the parent of others."""
    return f"{name} {of}" if of else name


def open_spans(config: "Config", part: str, name: str = "") -> Spans:
    """Open the receiver of a process' spans. Blocks only for imports.

    Raises:
        ConfigError: the packages of OpenTelemetry are not installed here, or the file cannot be written.
    """
    traces = config.telemetry.traces
    if traces is None:
        return NoSpans()
    check_installed("opentelemetry", "telemetry.traces")
    return _OpenSpans(config, f"{part} {name}".strip(), _LoggedOnce(_exporter(traces), redact(traces)))


class _OpenSpans:
    def __init__(self, config: "Config", who: str, exporter: "_LoggedOnce") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._run, self._share = config.run, config.telemetry.share
        about = {"service.name": "penstock", "service.instance.id": who, "penstock.run": config.run}
        self._resource = Resource(about)
        self._processor = BatchSpanProcessor(
            cast("SpanExporter", exporter),
            max_queue_size=MAX_QUEUED,
            max_export_batch_size=MAX_SENT,
            schedule_delay_millis=1000 * EVERY_S,
            export_timeout_millis=1000 * TIMEOUT_S,
        )

    def add(
        self, job: str, name: str, begin_s: float, end_s: float, *, of: str = "", under: str = ROOT, **about: Value
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan

        begin_ns, end_ns = _nanoseconds(begin_s), _nanoseconds(end_s)
        if begin_ns is None or end_ns is None:
            return
        trace = _number(16, self._run, job)
        if (trace >> 64) / 2**64 >= self._share:
            return  # every process decides alike
        own = name_of(name, of)
        # Made as ended: the process' own id generator, sampler or context would affect it otherwise.
        span = ReadableSpan(
            name,
            context=_context(trace, _number(8, self._run, job, own)),
            parent=None if own == ROOT else _context(trace, _number(8, self._run, job, under)),
            resource=self._resource,
            attributes={"penstock.job": job, **{f"penstock.{key}": value for key, value in about.items()}},
            start_time=begin_ns,
            end_time=max(begin_ns, end_ns),
        )
        self._processor.on_end(span)

    def close(self) -> None:
        # A collector that does not answer would delay the end of the process for longer.
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _nanoseconds(time_s: float) -> int | None:
    """Convert to nanoseconds; None for a time that no span can have."""
    return round(1e9 * time_s) if 0 <= time_s < _MAX_TIME_S else None


def _number(num_bytes: int, *parts: str) -> int:
    """Derive a nonzero id from ``parts``."""
    of = "\0".join(parts).encode(errors="backslashreplace")
    return int.from_bytes(blake2b(of, digest_size=num_bytes).digest()) or 1


def _context(trace: int, span: int) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _exporter(traces: str) -> "SpanExporter":
    if not traces.startswith(("http://", "https://")):
        return _file_exporter(traces)
    check_installed("opentelemetry.exporter.otlp.proto.http", "telemetry.traces with an address")
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    _know_headers()
    logging.getLogger(trace_exporter.__name__).addFilter(_is_not_ours)
    base = traces.rstrip("/")
    return trace_exporter.OTLPSpanExporter(
        endpoint=base if base.endswith("/v1/traces") else f"{base}/v1/traces", timeout=TIMEOUT_S
    )


def _know_headers() -> None:
    """Redact passwords of the collector: the library logs a header that it cannot read."""
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        for header in os.environ.get(name, "").split(","):
            own, equals, value = header.partition("=")
            secret = (value if equals else own).strip()
            know(secret)
            know(unquote(secret))


def _file_exporter(path: str) -> "SpanExporter":
    from opentelemetry.sdk.trace.export import SpanExportResult

    try:
        # Opening a pipe without a reader would block.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as exc:
        raise ConfigError(f"telemetry.traces: {path} cannot be written ({exc.strerror}): name another file.") from exc
    os.set_blocking(handle, True)

    class Lines:
        """Writes a span per line, as JSON. Several processes may append to one file: a message is one write."""

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            text = "".join(f"{span.to_json(indent=None)}\n" for span in spans).encode(errors="backslashreplace")
            if os.fstat(handle).st_size + len(text) > MAX_FILE_BYTES:
                raise OSError(f"it would have more than {MAX_FILE_BYTES:,} bytes")
            return SpanExportResult.SUCCESS if os.write(handle, text) == len(text) else SpanExportResult.FAILURE

        def shutdown(self) -> None:
            os.close(handle)

        def force_flush(self, timeout_millis: int = 0) -> bool:
            return True

    return cast("SpanExporter", Lines())


_sending = threading.local()


def _is_not_ours(_: logging.LogRecord) -> bool:
    """Filter the exporter's own message for each batch that it could not send."""
    return not getattr(_sending, "is_ours", False)


class _LoggedOnce:
    """An exporter that logs once that nothing can be sent, and once that it works again."""

    def __init__(self, exporter: "SpanExporter", where: str) -> None:
        self._exporter = exporter
        self._where = where
        self._fails = False
        self._left_out = 0

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        from opentelemetry.sdk.trace.export import SpanExportResult

        _sending.is_ours, why = True, ""
        try:
            result = self._exporter.export(spans)
        except Exception as exc:
            result, why = SpanExportResult.FAILURE, f": {format_exc(exc)}"
        finally:
            _sending.is_ours = False
        self._tell(len(spans), result is SpanExportResult.SUCCESS, why)
        return result

    def _tell(self, count: int, sent: bool, why: str) -> None:
        if not sent:
            self._left_out += count
            if not self._fails:
                log.warning("spans cannot be sent to %s (telemetry.traces), and are left out%s", self._where, why)
        elif self._fails:
            log.info("spans are sent to %s again; %d were left out", self._where, self._left_out)
            self._left_out = 0
        self._fails = not sent

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))
