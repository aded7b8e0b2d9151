"""What a worker's metrics say of the copies of versions that its engine was given (``transport: delta``)."""

from typing import NamedTuple
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from penstock.workers.metrics import TOTALS


class Copied(NamedTuple):
    """Sums of one process so far."""

    #: Those that were there already as well.
    num: int = 0
    num_whole: int = 0
    took_s: float = 0.0


def copied_by(metrics: str) -> Copied:
    """From the address of a worker's metrics; raises URLError where it is gone. Blocks."""
    with urlopen(metrics, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    copies = {labels[1]: int(value) for labels, value in found.items() if labels[0] == TOTALS["weight_copies"].shown_as}
    return Copied(sum(copies.values()), copies.get("whole", 0), found[TOTALS["weight_copy_s"].shown_as,])
