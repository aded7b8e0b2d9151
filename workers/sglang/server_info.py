"""Parse ``/server_info`` of an SGLang server, and merge the properties of several servers."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineError
from penstock.text import MAX_NAME, safe_repr, utf8_safe
from penstock.workers.sglang.capabilities import capabilities_of


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of one server, or of several that form one engine; the defaults are those of an unknown server."""

    #: Release of SGLang.
    version: str = ""
    #: Whether answers say which weights generated which tokens.
    reports_spans: bool = False
    #: Most tokens of prompt and answer together.
    max_context: int = sys.maxsize
    #: Whether it samples by seeds.
    deterministic: bool = False
    #: Whether requests may reuse the KV of others with the same prefix.
    shares_prefixes: bool = True
    #: Whether stream events have only new tokens instead of all so far.
    streams_increments: bool = False
    #: Processes that hold its weights, if they can be sent without the disk; else 0.
    num_ranks: int = 0
    #: Whether it can release memory while it runs.
    saves_memory: bool = False
    #: Tokens after a weight change that may still be of the old weights (results in flight).
    window: int = 0


def read_info(answer: Mapping[str, Any], reports_spans: bool | None = None) -> ServerInfo:
    """Parse an answer of ``/server_info``.

    Args:
        reports_spans: value set in the configuration; None: that of the release.

    Raises:
        ConfigError: its release is too old.
        EngineError: a number is malformed.
    """
    version = utf8_safe(str(answer.get("version", "")), MAX_NAME)
    capabilities = capabilities_of(version)
    plain = (answer.get("pp_size") or 1) == 1 and (answer.get("dp_size") or 1) == 1
    return ServerInfo(
        version=version,
        reports_spans=capabilities.reports_spans if reports_spans is None else reports_spans,
        max_context=_number(answer, "max_req_input_len") or sys.maxsize,
        deterministic=bool(answer.get("enable_deterministic_inference", False)),
        shares_prefixes=not answer.get("disable_radix_cache", False),
        streams_increments=bool(answer.get("incremental_streaming_output", False)),
        num_ranks=(_number(answer, "tp_size") or 1) if plain else 0,
        # A CPU server accepts the calls and frees nothing.
        saves_memory=bool(answer.get("enable_memory_saver")) or answer.get("device") == "cpu",
        window=_window(answer),
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
