"""Capabilities of each SGLang release: one table, read from the released packages 0.5.17 to 0.5.23.

Tested: 0.5.20 in CI on CPU, 0.5.17 on a GPU, and in tests/integration/test_engine.py on CPU 0.5.17, 0.5.19, 0.5.21 and
0.5.23, all with torch 2.13.0 (0.5.17 and 0.5.23 pin others). Of 0.5.18 and 0.5.22 only the code was read. The release
is the one that ``/server_info`` reports, so the table applies to external servers as to spawned ones.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """One row: capabilities of releases from ``since`` up to the next row."""

    since: tuple[int, ...]
    #: Answers say which weights generated which tokens; before, only the version at the end.
    reports_spans: bool
    #: Argument that makes a stream send each token once; without it every event repeats the whole answer.
    incremental_streaming_flag: str = "incremental-streaming-output"


_V17 = Capabilities(since=(0, 5, 17), reports_spans=False)
_V19 = replace(_V17, since=(0, 5, 19), reports_spans=True)

#: Oldest first.
TABLE = (_V17, _V19)
#: Newest release the table covers.
NEWEST = (0, 5, 23)

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


def capabilities_of(version: str) -> Capabilities:
    """Return the row of a release; the newest row, with a warning, if the release is newer than the table.

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
            "SGLang %s is newer than %s, the newest release penstock knows: assuming that it behaves the same",
            version,
            ".".join(map(str, NEWEST)),
        )
    return [row for row in TABLE if row.since <= release][-1]
