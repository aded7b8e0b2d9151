"""What each release of SGLang can do: one table, read from the released packages 0.5.17 to 0.5.23.

Seen running: 0.5.20 in CI on CPU, 0.5.17 on a GPU, and in tests/integration/test_engine.py on CPU 0.5.17, 0.5.19,
0.5.21 and 0.5.23, all with torch 2.13.0 (0.5.17 and 0.5.23 pin others). 0.5.18 and 0.5.22 were read. The release is
that which ``/server_info`` reports, so the table holds for external servers as for spawned ones.

| from   | what changed for penstock                                                                             |
|--------|-------------------------------------------------------------------------------------------------------|
| 0.5.17 | oldest supported: pause modes, weight_version, /server_info, /model_info, /v1/loads, /weights_checker |
| 0.5.18 | leaves what it imported out of later passes of Python's collector; 0.5.17 is asked to           |
| 0.5.19 | answers carry ``weight_versions``, the spans of tokens drawn under each version                       |
| 0.5.20 | arguments that were deprecated before are gone (see ``RENAMED``)                                      |
| 0.5.21 | /get_load is gone; pushed weights name ``selector`` instead of ``disable_draft_model``                |
| 0.5.22 | a flush that is refused after an update fails the call; before, it ended the scheduler                |
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One row: what servers from ``since`` on can do, until the next row."""

    since: tuple[int, ...]
    #: Answers say which tokens were drawn under which weights; before, only the version at the end.
    reports_spans: bool
    #: Argument with which a stream sends each token once; without it every line repeats the whole answer.
    incremental_streaming_flag: str = "incremental-streaming-output"


_V17 = Capabilities(since=(0, 5, 17), reports_spans=False)
_V19 = replace(_V17, since=(0, 5, 19), reports_spans=True)

#: Oldest first.
TABLE = (_V17, _V19)
#: Newest release that was read for the table.
NEWEST = (0, 5, 23)

#: Arguments that a newer release no longer knows, and what says the same there (and in 0.5.17 already).
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
    """The numbers of a version such as "0.5.20.post1", without what follows them."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def capabilities_of(version: str) -> Capabilities:
    """The row of a release; the newest one, with a warning, where the release is newer than the table.

    Raises:
        ConfigError: the release is older than 0.5.17, or is not a release.
    """
    release = release_of(version)
    if release < TABLE[0].since:
        raise ConfigError(
            f"the engine is SGLang {version or 'of an unknown version'}, and penstock needs 0.5.17 or later: older "
            "servers cannot freeze requests while weights change; install a newer sglang in the engine's environment."
        )
    if release[:3] > NEWEST:
        log.warning(
            "SGLang %s is newer than %s, the newest that penstock knows: it is taken to do what that one does",
            version,
            ".".join(map(str, NEWEST)),
        )
    return [row for row in TABLE if row.since <= release][-1]
