"""Read the phase of a starting SGLang server from its log."""

import re
from dataclasses import replace
from typing import Final

from penstock.protocol.records.causes import EngineStarting

#: Text in the log that begins a phase -> the phase.
_BEGINS: Final = (
    ("server_args=", EngineStarting("processes")),
    ("Load weight begin", EngineStarting("weights")),
    ("Load weight end", EngineStarting("kv_cache")),
    ("Memory pool end", EngineStarting("setup")),
    ("Capture cuda graph begin", EngineStarting("cuda_graphs")),
    ("Capture cuda graph end", EngineStarting("setup")),
    ("Started server process", EngineStarting("port")),
)
#: Progress bars of loading shards and capturing graphs.
_SHARE = re.compile(r"\b([0-9]{1,3})% ?(?:Completed)? ?\|")


def phase_of(written: str) -> EngineStarting:
    """Return the phase of a server that has written this since it was started."""
    at, phase = max(((written.rfind(begins), phase) for begins, phase in _BEGINS), key=lambda found: found[0])
    if at < 0:
        return EngineStarting("imports")
    share = next(reversed(_SHARE.findall(written, at)), "100")
    return replace(phase, percent=min(int(share), 100))
