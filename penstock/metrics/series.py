"""Series of metrics: name, kind and help text in one place; families are made from them for each scrape.

A figure with a name in slime has that name, converted by a rule (``slime``), so that users of slime find it:
``rollout/response_len/mean`` is ``rollout_response_len_mean``. All others begin with ``penstock_``.
"""

import re
import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.text import printable, utf8_safe

#: Most samples of one family: labels come from records, which may be any number.
MAX_SAMPLES = 1000
#: Most characters of a label's value.
MAX_LABEL = 120

Labels = str | tuple[str, ...]


class Histogram:
    """Counts of values by bucket; cheap to add to. One thread adds, others read.

    Args:
        bounds: upper ends of the buckets, ascending; values above the last are counted too.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper ends as text, with the number of values at or below each."""
        ends = [f"{bound:g}" for bound in self.bounds] + ["+Inf"]
        return list(zip(ends, map(float, accumulate(self.counts)), strict=True))


@dataclass(frozen=True, slots=True)
class Series:
    """One series, or one for each value of its labels."""

    #: Name in Prometheus, without the ``_total`` of counters.
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    #: What it counts or measures, with its unit; a sentence.
    says: str
    labels: tuple[str, ...] = ()
    #: slime's name for it; '' if it has none.
    slime: str = ""

    @property
    def shown_as(self) -> str:
        """The name that queries use."""
        return self.name + {"counter": "_total", "gauge": "", "histogram": "_bucket"}[self.kind]

    def of(self, value: float) -> Metric:
        """Return the family of a series without labels."""
        return self.each({(): value})

    def each(self, values: Mapping[Any, float] | Iterable[tuple[Labels, float]]) -> Metric:
        """Return the family of all values by their labels, the first ``MAX_SAMPLES`` of them."""
        family = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(
            self.name, self.says, labels=self.labels
        )
        # A copy: other threads add to the counts of a process while they are read.
        pairs = list(values.items() if isinstance(values, Mapping) else values)
        # A map by labels: duplicates after shortening would make Prometheus refuse the complete scrape.
        for labels, value in {_labels(one): value for one, value in islice(pairs, MAX_SAMPLES)}.items():
            family.add_metric(labels, value)
        return family

    def family(self, values: Any) -> Metric:
        """Return the family of a histogram, of values by label, or of the value of a series without labels."""
        if not isinstance(values, Histogram):
            return self.each(values) if self.labels else self.of(values)
        family = HistogramMetricFamily(self.name, self.says)
        family.add_metric([], buckets=values.buckets(), sum_value=values.sum)
        return family


def counter(name: str, says: str, *labels: str) -> Series:
    """Make a series of a sum that only grows during the life of its process."""
    return Series(f"penstock_{name}", "counter", says, labels)


def gauge(name: str, says: str, *labels: str) -> Series:
    """Make a series of a current value."""
    return Series(f"penstock_{name}", "gauge", says, labels)


def slime(name: str, says: str) -> Series:
    """Make a gauge with slime's name, for the last batch or version.

    ``/``, ``-`` and ``.`` become ``_``, ``@`` becomes ``_at_``, and names in braces are labels:
    ``eval/{dataset}-truncated_ratio`` is ``eval_truncated_ratio{dataset=...}``.
    """
    labels = tuple(re.findall(r"{(\w+)}", name))
    plain = re.sub(r"[/\-.]+", "_", re.sub(r"{\w+}", "", name).replace("@", "_at_"))
    return Series(re.sub(r"_+", "_", plain).strip("_"), "gauge", says, labels, name)


def table(text: str) -> dict[str, Series]:
    """Parse a line per series: its key, kind or ``slime``, name with labels in braces, and help text.

    A line that is indented further continues the one before.
    """
    lines = re.sub(r"\n +", " ", textwrap.dedent(text).strip()).splitlines()
    return {key: _parse(kind, name, says) for key, kind, name, says in (line.split(maxsplit=3) for line in lines)}


def _parse(kind: str, name: str, says: str) -> Series:
    if kind == "slime":
        return slime(name, says)
    base, _, labels = name.partition("{")
    return Series(f"penstock_{base}", kind, says, tuple(re.findall(r"\w+", labels)))  # type: ignore[arg-type]


def families(series: Mapping[str, Series], values: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the families of a table whose values are known (not None), by their keys."""
    return (one.family(values[key]) for key, one in series.items() if values.get(key) is not None)


def _labels(values: Labels) -> tuple[str, ...]:
    return tuple(printable(utf8_safe(one[:MAX_LABEL])) for one in ((values,) if isinstance(values, str) else values))
