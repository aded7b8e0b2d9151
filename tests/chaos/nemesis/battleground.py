"""Makes a cluster one on which given kinds of faults can strike: a proxy, small disks, false clocks, a replica.

with battleground(Cluster(folder, WORKLOADS["async"]), kinds) as ground:
    ground.cluster.wait("a first batch", ground.cluster.committed)
    nemesis = Nemesis(ground, Schedule(seed, kinds), kinds, Log(folder / "nemesis.jsonl", {"seed": seed}))
    try:
        counted = nemesis.run(30)
    finally:
        nemesis.close()
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.proxy_control import ProxyControl
from tests.chaos.nemesis.act import Ground, Kind
from tests.chaos.nemesis.clock import library
from tests.chaos.nemesis.disk import small_disks
from tests.chaos.nemesis.failover import Failover

#: Parts that are no clients of the control Redis.
SERVERS = ("redis", "payload", "engine")


@contextmanager
def battleground(cluster: Cluster, kinds: Mapping[str, Kind]) -> Iterator[Ground]:
    """Enter ``cluster`` with what these kinds need. A sentinel and a proxy exclude each other: the proxy goes first."""
    families = {name.partition(":")[0] for name in kinds}
    cluster.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ground = Ground(cluster, clocks=library())
        if "disk" in families:
            ground.disks = stack.enter_context(small_disks(cluster.folder))
        if "net" in families:
            ground.proxy = _proxy(cluster, stack)
        elif "sentinel" in families:
            ground.failover = Failover(cluster)
        stack.enter_context(cluster)
        if ground.failover is not None:
            ground.failover.start()
        yield ground


def _proxy(cluster: Cluster, stack: ExitStack) -> ProxyControl:
    proxy = ProxyControl(cluster.folder / "logs", "127.0.0.1", cluster.redis_port)
    stack.callback(proxy.stop)
    cluster.url_for = lambda name: cluster.redis_url if name.startswith(SERVERS) else proxy.url(name)
    return proxy
