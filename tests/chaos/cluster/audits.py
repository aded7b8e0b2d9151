"""What ``penstock audit`` says of a run, and whether it may."""

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.chaos.cluster.collect import forgotten, lost_servers
from tests.chaos.cluster.supervisor import searched

if TYPE_CHECKING:
    from tests.chaos.cluster.cluster import Cluster


def audit(cluster: "Cluster") -> dict[str, Any]:
    """What ``penstock audit`` says of the run; ``ok`` where nothing differs. Blocks."""
    words = ["audit", "--run", cluster.keys.run, "--redis", cluster.redis_url, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *words],
        cwd=cluster.folder,
        env={**os.environ, "PYTHONPATH": searched(str(cluster.folder / "source"))},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        return {"ok": False, "differences": [f"penstock audit failed: {done.stderr[-500:]}"]}
    found: dict[str, Any] = json.loads(done.stdout)
    return {"ok": done.returncode == 0} | found


def may_tell_lost(cluster: "Cluster") -> bool:
    """Whether an audit may say that payloads were lost.

    Of a payload server that was lost for good it has to tell the samples that lay there, which the checker holds
    against the history (``misreported``); and so where Redis forgot that groups were done with whose payloads lay
    elsewhere.
    """
    elsewhere = cluster.workload.payload_servers > 0
    return any(lost_servers(cluster)) or (elsewhere and any(forgotten(cluster)))


def differing(found: dict[str, Any], *, lost_is_known: bool) -> str:
    """What an audit found that must not be; '' for nothing.

    Nothing but lost payloads may differ where it is ``lost_is_known`` that there are some.
    """
    wrong = [one for one in found["differences"] if not (lost_is_known and one.startswith("payloads: "))]
    if found["ok"] or (found["differences"] and not wrong):
        return ""
    return "; ".join(wrong) or "it found a difference"
