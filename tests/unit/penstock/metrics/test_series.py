"""Series as Prometheus is given them: names by the rule, labels that it takes whatever records hold."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.metrics.series import MAX_SAMPLES, Histogram, counter, families, gauge, slime, table

HISTOGRAM = table("a histogram a Values.")["a"]


class Of(Collector):
    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> tuple[Metric, ...]:
        return self.families


def scraped(*families: Metric) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and values of the labels -> value, as a parser of the format reads what is served."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Of(*families))
    read = text_string_to_metric_families(generate_latest(registry).decode())
    return {(one.name, tuple(one.labels.values())): one.value for family in read for one in family.samples}


@pytest.mark.parametrize(
    ("name", "series", "labels"),
    [
        ("rollout/response_len/mean", "rollout_response_len_mean", ()),
        ("rollout/zero_std/count_{reward}", "rollout_zero_std_count", ("reward",)),
        ("rollout/dynamic_filter/drop_{reason}", "rollout_dynamic_filter_drop", ("reason",)),
        ("eval/{dataset}", "eval", ("dataset",)),
        ("eval/{dataset}-truncated_ratio", "eval_truncated_ratio", ("dataset",)),
        ("eval/{dataset}-pass@{k}", "eval_pass_at", ("dataset", "k")),
    ],
)
def test_names_of_slime_follow_the_rule(name: str, series: str, labels: tuple[str, ...]) -> None:
    made = slime(name, "")

    assert (made.name, made.labels, made.slime) == (series, labels, name)


def test_kinds_have_the_endings_that_queries_use() -> None:
    assert counter("a", "").shown_as == "penstock_a_total"
    assert gauge("a", "").shown_as == "penstock_a"
    assert HISTOGRAM.shown_as == "penstock_a_bucket"


def test_a_table_has_a_line_per_series_and_families_of_the_values_that_are_known() -> None:
    series = table("""
        jobs gauge jobs{lane,state} Jobs of each lane,
            queued or leased.
        sent counter sent Bytes sent.
        mean slime rollout/mean/{kind} A mean.
    """)

    assert series == {
        "jobs": gauge("jobs", "Jobs of each lane, queued or leased.", "lane", "state"),
        "sent": counter("sent", "Bytes sent."),
        "mean": slime("rollout/mean/{kind}", "A mean."),
    }
    found = scraped(*families(series, {"jobs": {("train", "queued"): 2.0}, "sent": 3, "mean": None}))
    assert found == {("penstock_jobs", ("train", "queued")): 2, ("penstock_sent_total", ()): 3}


def test_labels_are_harmless_whatever_a_record_holds() -> None:
    series = gauge("a", "", "who")

    found = scraped(series.each({'x"\n\\\x1b[31m\ud800\u202e': 1.0, "long" * 1000: 2.0}))

    escaped, long = (labels[0] for _, labels in found)
    assert "\x1b" not in escaped
    assert "\u202e" not in escaped
    assert len(long) == 120


def test_labels_that_are_the_same_once_they_are_cut_are_one_sample() -> None:
    found = gauge("a", "", "who").each({"x" * 500 + "1": 1.0, "x" * 500 + "2": 2.0})

    assert len(found.samples) == 1, "Prometheus refuses a scrape that has a sample twice"


def test_a_family_is_bounded() -> None:
    assert len(gauge("a", "", "who").each({str(i): 0.0 for i in range(5 * MAX_SAMPLES)}).samples) == MAX_SAMPLES


def test_a_histogram_counts_what_is_at_or_below_each_bound() -> None:
    values = Histogram((1, 4))
    for value in (0, 1, 2, 4, 5):
        values.add(value)

    found = scraped(HISTOGRAM.family(values))

    counts = {labels: value for (name, labels), value in found.items() if name == "penstock_a_bucket"}
    assert counts == {("1",): 2, ("4",): 4, ("+Inf",): 5}
    assert found["penstock_a_sum", ()] == 12
