"""How far a starting SGLang server is, by what it writes into its log."""

import re
from typing import Final

#: What stands in the log where a phase begins -> what it does then.
_BEGINS: Final = (
    ("server_args=", "starting its processes"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating keys and values"),
    ("Memory pool end", "getting ready to serve"),
    ("Capture cuda graph begin", "capturing CUDA graphs"),
    ("Capture cuda graph end", "getting ready to serve"),
    ("Started server process", "opening its port"),
)
#: Before it has written any of them.
FIRST: Final = "importing its packages"
#: Of bars that it draws while it loads shards or captures graphs.
_SHARE = re.compile(r"\b([0-9]{1,3})% ?(?:Completed)? ?\|")


def phase_of(written: str) -> str:
    """What a server that wrote this since it was started is doing, with the share done where it says one."""
    at, phase = max(((written.rfind(begins), phase) for begins, phase in _BEGINS), key=lambda found: found[0])
    if at < 0:
        return FIRST
    share = next(reversed(_SHARE.findall(written, at)), None)
    return phase if share is None or int(share) >= 100 else f"{phase} ({share} %)"
