"""How often each kind of fault is to strike, over all runs together, and how often it has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.nemesis.kinds import KINDS
from tests.chaos.nemesis.signals import PARTS

#: Strikes that count: kill -9 of each part, of a real engine, and of every other kind.
KILLS, REAL_KILLS, OTHERS = 300, 100, 200
#: What kills of a real engine are called; those of the others do not count for it.
REAL_ENGINE = "kill:engine of SGLang"
#: Largest share of the network's faults in all that count.
NET, NET_SHARE = "net", 0.25

Rows = Sequence[Mapping[str, Any]]

TARGETS = {name: KILLS if name in {f"kill:{part}" for part in PARTS} else OTHERS for name in KINDS}
TARGETS[REAL_ENGINE] = REAL_KILLS


def target_of(workload: str, kind: str) -> str:
    """The target that a strike of this kind counts for; a workload that is no more is one of the others."""
    is_real = workload in WORKLOADS and WORKLOADS[workload].is_real
    return REAL_ENGINE if is_real and kind == "kill:engine" else kind


def struck(rows: Rows, figure: str = "counted") -> Counter[str]:
    """Target -> strikes of these runs: those that count, or all that were done (``faults``)."""
    found = Counter[str]()
    for row in rows:
        for kind, times in row[figure].items():
            found[target_of(row["workload"], kind)] += times
    return found


def tried(rows: Rows) -> Counter[str]:
    """As ``struck``; what a run was asked for in vain counts once, so that others get their turn."""
    found = struck(rows)
    for row in rows:
        found.update(target_of(row["workload"], kind) for kind in row["kinds"] if kind not in row["counted"])
    return found


def net_share(counted: Mapping[str, float]) -> float:
    """Share of the network's faults; 0 where nothing was struck yet."""
    whole = sum(counted.values())
    of_net = sum(times for kind, times in counted.items() if kind.partition(":")[0] == NET)
    return of_net / whole if whole else 0.0
