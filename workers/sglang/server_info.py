"""Parse ``/server_info`` of an SGLang server, and merge the properties of several servers.

Tested: 0.5.20 in CI on CPU, 0.5.17 on a GPU, and in tests/integration/test_engine.py on CPU 0.5.17, 0.5.19, 0.5.21
and 0.5.23, all with torch 2.13.0 (0.5.17 and 0.5.23 pin others). Of 0.5.18 and 0.5.22 only the code was read.

| from   | what changed for penstock                                                                             |
|--------|-------------------------------------------------------------------------------------------------------|
| 0.5.17 | oldest supported: pause modes, weight_version, /server_info, /model_info, /v1/loads, /weights_checker |
| 0.5.18 | excludes its imports from Python's garbage collection; 0.5.17 needs a request to do so                |
| 0.5.19 | answers carry ``weight_versions``, the spans of tokens generated under each version                   |
| 0.5.20 | arguments that were deprecated before are gone (see ``RENAMED``)                                      |
| 0.5.21 | /get_load is gone; pushed weights name ``selector`` instead of ``disable_draft_model``                |
| 0.5.22 | a flush that is refused after an update fails the call; before, it ended the scheduler                |
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


#: Oldest supported release, the first whose answers report which weights generated which tokens (before, only the
#: version at the end), and the newest that the table above covers.
OLDEST, REPORTS_SPANS, NEWEST = (0, 5, 17), (0, 5, 19), (0, 5, 23)
#: Argument that makes a stream send each token once; without it every event repeats the whole answer.
INCREMENTAL_FLAG = "incremental-streaming-output"

#: Arguments removed in a newer release, and their replacements (which 0.5.17 already has).
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
    """Return whether answers of a release report the spans of tokens generated under each version.

    A release that is newer than ``NEWEST`` counts as that one, with a warning.

    Raises:
        ConfigError: the release is older than 0.5.17, or is not a release.
    """
    release = release_of(version)
    if release < OLDEST:
        raise ConfigError(
            f"the engine is SGLang {version or 'of an unknown version'}, and penstock needs 0.5.17 or later: older "
            "servers cannot freeze requests while weights change; install a newer sglang in the engine's environment."
        )
    if release[:3] > NEWEST:
        newest = ".".join(map(str, NEWEST))
        log.warning(
            "SGLang %s is newer than %s, the newest release penstock knows: assuming that it behaves the same",
            version,
            newest,
        )
    return release >= REPORTS_SPANS


@dataclass(frozen=True, slots=True)
class ServerInfo(EngineInfo):
    """Properties of one server, or of several that form one engine; the defaults are those of an unknown server."""

    #: Whether answers say which weights generated which tokens.
    reports_spans: bool = False
    #: Whether it samples by seeds.
    deterministic: bool = False
    #: Whether requests may reuse the KV of others with the same prefix.
    shares_prefixes: bool = True
    #: Whether stream events have only new tokens instead of all so far.
    streams_increments: bool = False
    #: Tokens after a weight change that may still be of the old weights (results in flight).
    window: int = 0
    #: Whether requests may be sent as a batch whose answers are streamed.
    takes_batches: bool = False


def read_info(answer: Mapping[str, Any]) -> ServerInfo:
    """Parse an answer of ``/server_info``.

    Raises:
        ConfigError: its release is too old.
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
        # A CPU server accepts the calls and frees nothing.
        saves_memory=bool(answer.get("enable_memory_saver")) or answer.get("device") == "cpu",
        window=_window(answer),
        # Those that report spans were tried; a router does not pass batches, and does not report its arguments.
        takes_batches=has_spans and "stream_interval" in answer,
    )


def _number(answer: Mapping[str, Any], name: str) -> int:
    """Return a number of the answer; 0 if missing."""
    value = answer.get(name) or 0
    if type(value) is not int or not 0 <= value < 2**63:
        raise EngineError(f"the server reports {name} = {safe_repr(value)}, which is not a number.")
    return value


def _window(answer: Mapping[str, Any]) -> int:
    """Return ``ServerInfo.window``. If steps overlap, a result of the old weights may be counted after the change: at
    most one token per request, or a whole draft when speculating. Servers do not report which requests had one."""
    overlaps = not answer.get("disable_overlap_schedule", False) or _number(answer, "pp_size") > 1
    return max(1, _number(answer, "speculative_num_draft_tokens") + 1) if overlaps else 0


def merge(infos: Sequence[ServerInfo]) -> ServerInfo:
    """Merge servers of one engine: the least capability of any, the largest need of any.

    All stream in the same form; weights are sent to none of them without the disk.
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
