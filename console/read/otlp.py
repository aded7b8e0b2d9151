"""Send a span of time of a run to a collector that accepts OTLP over HTTP: one trace for each job.

    job               from its admission to the end of its last stage
    ├ attempt         one lease, with its end
    └ sample          its stages within it: queued, prefill, decode, reward, commit, cut, train and others

The ids of traces and spans are derived from the run, the job and their place in it, so a span that is sent twice has
the same id. Headers and certificates of the collector are set by the OTEL_EXPORTER_OTLP_ variables of the environment.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from penstock.console.read.stages import known_tries, stages_of
from penstock.errors import ConfigError, PenstockError
from penstock.history.row import WHOLE_JOB, SampleRow
from penstock.text import redact

#: Spans per request, and its time limit with retries.
MAX_SENT, TIMEOUT_S = 512, 10.0


def send_spans(url: str, run: str, rows: Sequence[SampleRow]) -> int:
    """Send the spans of samples; return their number. Blocks.

    Raises:
        ConfigError: the address is invalid.
        PenstockError: the collector does not accept them.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError(
            "--otlp is not the address of a collector: write http://HOST:PORT or https://HOST:PORT, and set a password "
            "in OTEL_EXPORTER_OTLP_HEADERS."
        )
    base = url.rstrip("/").removesuffix("/v1/traces")
    exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=TIMEOUT_S)
    spans, count = spans_of(run, rows), 0
    while batch := list(islice(spans, MAX_SENT)):
        if exporter.export(batch) is not SpanExportResult.SUCCESS:
            raise PenstockError(f"The collector at {redact(url)} did not accept spans; {count} were sent before.")
        count += len(batch)
    return count


def spans_of(run: str, rows: Iterable[SampleRow]) -> Iterator[ReadableSpan]:
    """Yield the spans of all jobs that these samples are of."""
    resource = Resource({"service.name": "penstock", "penstock.run": run})
    jobs: dict[str, list[SampleRow]] = {}
    for row in rows:
        jobs.setdefault(row.job, []).append(row)
    for job, found in jobs.items():
        for name, own, parent, begin_s, end_s, about in _job_spans(found):
            trace = _id(16, run, job)
            yield ReadableSpan(
                name,
                context=_context(trace, _id(8, run, job, own)),
                parent=None if own == parent else _context(trace, _id(8, run, job, parent)),
                resource=resource,
                attributes={"penstock.job": job} | {f"penstock.{key}": value for key, value in about.items()},
                start_time=round(1e9 * begin_s),
                end_time=round(1e9 * end_s),
            )


def _job_spans(rows: Sequence[SampleRow]) -> Iterator[tuple[str, str, str, float, float, dict[str, Any]]]:
    """Yield (name, own place, parent's place, begin, end, attributes) of a job; the root is its own parent."""
    tries = [one for one in known_tries(rows[0]) if one.ended_s > one.leased_s]
    samples = [(row, stages_of(row, tries)) for row in rows if row.k != WHOLE_JOB and not row.part]
    times = [(one.begin_s, one.end_s) for _, stages in samples for one in stages]
    times += [(one.leased_s, one.ended_s) for one in tries]
    if not times:
        return
    yield "job", "job", "job", min(times)[0], max(end for _, end in times), {"samples": len(samples)}
    for one in tries:
        about: dict[str, Any] = {"worker": one.worker, "lane": one.lane, "end": one.end}
        yield "attempt", f"attempt {one.number}", "job", one.leased_s, one.ended_s, about
    for row, stages in ((row, stages) for row, stages in samples if stages):
        about = {"sample": row.id, "worker": row.worker, "tokens": row.num_generated, "fate": row.fate or row.reason}
        yield "sample", row.id, "job", stages[0].begin_s, max(stage.end_s for stage in stages), about
        for number, stage in enumerate(stages):
            yield stage.name, f"{row.id} {number}", row.id, stage.begin_s, stage.end_s, {}


def _id(num_bytes: int, *parts: str) -> int:
    return int.from_bytes(blake2b("\0".join(parts).encode(errors="replace"), digest_size=num_bytes).digest()) or 1


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
