"""Another configuration at a restart, which a run takes or refuses."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from tests.chaos.cluster.workloads import WORKLOADS, Workload
from tests.chaos.nemesis import membership


class Cluster:
    """A producer and a trainer, which commits while the other is killed, and refuses another mode than its first."""

    def __init__(self) -> None:
        self.workload: Workload = WORKLOADS["sync"]
        self.first = self.workload
        self.watch = SimpleNamespace(committed_of=Counter())
        self.supervisor = SimpleNamespace(unexpected=self.ends)
        self.killed: list[str] = []
        self.looks = 0

    def of(self, kind: str) -> list[Any]:
        return (
            [SimpleNamespace(name=kind, command=["--config", f"{kind}.yaml"])]
            if kind in ("producer", "trainer")
            else []
        )

    def write_config(self, name: str) -> None:
        pass

    def kill(self, part: Any) -> None:
        self.killed.append(part.name)
        if part.name == "producer":
            self.watch.committed_of[self.workload.trainers[0].name] += 3

    def ends(self) -> list[tuple[str, int]]:
        """What the trainer ended with so far: once more at each look while it refuses."""
        self.looks += self.workload is not self.first and "trainer" in self.killed
        return [("trainer", 1)] * self.looks


def test_what_a_trainer_commits_before_it_is_killed_does_not_say_that_it_takes_its_configuration() -> None:
    cluster = Cluster()
    ground: Any = SimpleNamespace(cluster=cluster)
    membership.kinds()["member:config"].strike(ground, {"config": {"staleness": {"mode": "async"}}, "rolling": False})
    assert cluster.killed == ["producer", "trainer", "producer", "trainer"]
    assert cluster.workload is cluster.first
