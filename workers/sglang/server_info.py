"""Parse ``/server_info`` of an SGLang server, and merge the properties of several servers.

Tested: 0.5.20 in CI on CPU, 0.5.17 on a GPU, and in tests/integration/test_engine.py on CPU 0.5.17, 0.5.19, 0.5.21
and 0.5.23, all with torch 2.13.0 (0.5.17 and 0.5.23 pin others). 0.5.18 and 0.5.22 were only reviewed as code.

| from   | what changed for penstock                                                                             |
|--------|-------------------------------------------------------------------------------------------------------|
| 0.5.17 | oldest supported: pause modes, weight_version, /server_info, /model_info, /v1/loads, /weights_checker |
| 0.5.18 | excludes its imports from Python's garbage collection; 0.5.17 needs a request to do so                |
| 0.5.19 | answers carry ``weight_versions``, the spans of tokens generated under each version                   |
| 0.5.20 | removes deprecated arguments (see ``RENAMED``)                                                        |
| 0.5.21 | removes /get_load; pushed weights have ``selector`` instead of ``disable_draft_model``                |
| 0.5.22 | a refused flush after an update fails the call; before, it ended the scheduler                        |
"""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.errors import ConfigError, EngineError
from penstock.text import MAX_NAME, safe_repr, utf8_safe
from penstock.workers.engine import EngineInfo

log = logging.getLogger(__name__)


#: Oldest supported release; first release whose answers report version spans (before: only the version at the end);
#: newest release that the table above covers.
OLDEST, REPORTS_SPANS, NEWEST = (0, 5, 17), (0, 5, 19), (0, 5, 23)
#: Argument that makes streams send each token once; without it every event repeats the complete answer.
INCREMENTAL_FLAG = "incremental-streaming-output"

#: Arguments removed in newer releases -> replacements, which 0.5.17 already has.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "cuda-graph-bs": "cuda-graph-bs-decode",
        "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
        "disable-piecewise-cuda-graph": "disable-prefill-cuda-graph",
        "dsa-prefill-cp-mode": "cp-strategy",
        "enable-breakable-cuda-graph": "cuda-graph-backend-prefill",
        "enable-dsa-prefill-context-parallel": "enable-prefill-cp",
        "enable-gdn-replayssm-spec": "enable-linear-replayssm-spec",
        "enable-nsa-prefill-context-parallel": "enable-prefill-cp",
        "enable-prefill-context-parallel": "enable-prefill-cp",
        "enforce-piecewise-cuda-graph": "cuda-graph-backend-prefill",
        "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
        "nsa-decode-backend": "dsa-decode-backend",
        "nsa-prefill-backend": "dsa-prefill-backend",
        "nsa-prefill-cp-mode": "cp-strategy",
        "piecewise-cuda-graph-compiler": "cuda-graph-tc-compiler",
        "piecewise-cuda-graph-max-tokens": "cuda-graph-max-bs-prefill",
        "piecewise-cuda-graph-tokens": "cuda-graph-bs-prefill",
        "prefill-cp-mode": "cp-strategy",
        "speculative-dflash-draft-window-size": "speculative-draft-window-size",
        "stream-output": "incremental-streaming-output",
    }
)


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as "0.5.20.post1", without its suffix."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def reports_spans(version: str) -> bool:
    """Return whether answers of a release report version spans.

    Releases newer than ``NEWEST`` are treated like it, with a warning.

    Raises:
        ConfigError: the release is unknown or older than 0.5.17.
    """
    release = release_of(version)
    if release < OLDEST:
        raise ConfigError(
            f"the engine is SGLang {version or 'of an unknown version'}, but penstock needs 0.5.17 or later to freeze "
            "requests while weights change: install a newer sglang in the engine's environment."
        )
    if release[:3] > NEWEST:
        newest = ".".join(map(str, NEWEST))
        log.warning(
            "SGLang %s is newer than %s, the newest tested release: assuming the same behaviour",
            version,
            newest,
        )
    return release >= REPORTS_SPANS


@dataclass(frozen=True, slots=True)
class ServerInfo(EngineInfo):
    """Hold the properties of an engine of one or several servers; the defaults apply to unknown servers."""

    #: Whether answers report version spans.
    reports_spans: bool = False
    #: Whether the server samples with seeds.
    deterministic: bool = False
    #: Whether requests may reuse the KV cache of others with the same prefix.
    shares_prefixes: bool = True
    #: Whether stream events contain only new tokens instead of all tokens so far.
    streams_increments: bool = False
    #: Number of tokens after a weight change that the old weights may have generated (results in flight).
    window: int = 0
    #: Whether requests may be sent as a batch with streamed answers.
    takes_batches: bool = False


def read_info(answer: Mapping[str, Any]) -> ServerInfo:
    """Parse a ``/server_info`` answer.

    Raises:
        ConfigError: the release is too old.
        EngineError: a number is malformed.
    """
    version = utf8_safe(str(answer.get("version", "")), MAX_NAME)
    has_spans = reports_spans(version)
    plain = (answer.get("pp_size") or 1) == 1 and (answer.get("dp_size") or 1) == 1
    return ServerInfo(
        version=version,
        reports_spans=has_spans,
        max_context=_number(answer, "max_req_input_len") or sys.maxsize,
        deterministic=bool(answer.get("enable_deterministic_inference", False)),
        shares_prefixes=not answer.get("disable_radix_cache", False),
        streams_increments=bool(answer.get("incremental_streaming_output", False)),
        num_ranks=(_number(answer, "tp_size") or 1) if plain else 0,
        # A CPU server accepts the calls without freeing memory.
        saves_memory=bool(answer.get("enable_memory_saver")) or answer.get("device") == "cpu",
        window=_window(answer),
        # Tested for releases with spans; a router does not forward batches, and does not report stream_interval.
        takes_batches=has_spans and "stream_interval" in answer,
    )


def _number(answer: Mapping[str, Any], name: str) -> int:
    """Return a number of the answer, 0 if missing."""
    value = answer.get(name) or 0
    if type(value) is not int or not 0 <= value < 2**63:
        raise EngineError(f"the server reports an invalid {name} = {safe_repr(value)}: a number is needed.")
    return value


def _window(answer: Mapping[str, Any]) -> int:
    """Return ``ServerInfo.window``: with overlapping steps, a result of the old weights may count after the change, at
    most one token per request, or a complete draft. Servers do not report the affected requests."""
    overlaps = not answer.get("disable_overlap_schedule", False) or _number(answer, "pp_size") > 1
    return max(1, _number(answer, "speculative_num_draft_tokens") + 1) if overlaps else 0


def merge(infos: Sequence[ServerInfo]) -> ServerInfo:
    """Merge the servers of one engine: the smallest capabilities and the largest needs.

    All servers stream in the same form; weights reach them only through the disk.
    """
    return ServerInfo(
        version=min(one.version for one in infos),
        reports_spans=all(one.reports_spans for one in infos),
        max_context=min(one.max_context for one in infos),
        deterministic=any(one.deterministic for one in infos),
        shares_prefixes=any(one.shares_prefixes for one in infos),
        streams_increments=infos[0].streams_increments,
        num_ranks=0,
        saves_memory=all(one.saves_memory for one in infos),
        window=max(one.window for one in infos),
    )
