"""What an SGLang server says about itself in ``/server_info``, and what holds for several servers together."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineError
from penstock.text import MAX_NAME, safe_repr, utf8_safe
from penstock.workers.sglang.capabilities import capabilities_of


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One server, or several that stand for one engine; the defaults are those of a server that was never asked."""

    #: Release of SGLang.
    version: str = ""
    #: Whether answers say which tokens were drawn under which weights.
    reports_spans: bool = False
    #: Most tokens of prompt and answer together that it takes.
    max_context: int = sys.maxsize
    #: Whether it draws by seeds.
    deterministic: bool = False
    #: Whether requests may find the KV of others by their prefix.
    shares_prefixes: bool = True
    #: Whether each event of a stream holds what is new, not all so far.
    streams_increments: bool = False
    #: Processes that hold its weights, where they can be sent to it without the disk; else 0.
    num_ranks: int = 0
    #: Whether it can give memory back while it lives.
    saves_memory: bool = False
    #: Tokens behind a weight change that may still be of the old weights (results in flight).
    window: int = 0


def read_info(answer: Mapping[str, Any], reports_spans: bool | None = None) -> ServerInfo:
    """What ``/server_info`` answered.

    Args:
        reports_spans: what the configuration says of it; None: what the release does.

    Raises:
        ConfigError: its release is too old.
        EngineError: something that should be a number is not.
    """
    version = utf8_safe(str(answer.get("version", "")), MAX_NAME)
    known = capabilities_of(version)
    plain = (answer.get("pp_size") or 1) == 1 and (answer.get("dp_size") or 1) == 1
    return ServerInfo(
        version=version,
        reports_spans=known.reports_spans if reports_spans is None else reports_spans,
        max_context=_number(answer, "max_req_input_len") or sys.maxsize,
        deterministic=bool(answer.get("enable_deterministic_inference", False)),
        shares_prefixes=not answer.get("disable_radix_cache", False),
        streams_increments=bool(answer.get("incremental_streaming_output", False)),
        num_ranks=(_number(answer, "tp_size") or 1) if plain else 0,
        # A CPU server goes through the motions and frees nothing.
        saves_memory=bool(answer.get("enable_memory_saver")) or answer.get("device") == "cpu",
        window=_window(answer),
    )


def _number(answer: Mapping[str, Any], name: str) -> int:
    """A number of the answer; 0 where it has none."""
    value = answer.get(name) or 0
    if type(value) is not int or not 0 <= value < 2**63:
        raise EngineError(f"the server reports {name} = {safe_repr(value)}, which is not a number.")
    return value


def _window(answer: Mapping[str, Any]) -> int:
    """Where steps overlap, the result of one that ran under the old weights may be counted after the change: at most
    one token per request, or a whole draft when speculating. Whether a request had one is not shown."""
    overlaps = not answer.get("disable_overlap_schedule", False) or _number(answer, "pp_size") > 1
    return max(1, _number(answer, "speculative_num_draft_tokens") + 1) if overlaps else 0


def merge(infos: Sequence[ServerInfo]) -> ServerInfo:
    """What holds for servers together: the least that one of them can, the most that one of them needs.

    All stream alike; weights are sent to none of them without the disk.
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
