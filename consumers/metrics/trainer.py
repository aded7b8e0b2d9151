"""Metrics of one trainer, served by its rank 0, for the complete batch of its manifest."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.consumers.metrics.tally import Tally, lengths_of, same_rewards, truncated_ratio
from penstock.metrics.series import Series, counter, gauge, histogram, slime
from penstock.records.manifest import Manifest, first_rows

SUMS = {
    "batches": counter("trainer_batches", "Batches committed by this process; one that comes again counts again."),
    "groups": counter("trainer_groups", "Groups of these batches."),
    "samples": counter("trainer_samples", "Samples of these batches."),
    "generated_tokens": counter("trainer_generated_tokens", "Tokens of these samples that the policy generated."),
    "loss_tokens": counter("trainer_loss_tokens", "Tokens of these samples that bore loss."),
    "partial_groups": counter(
        "trainer_partial_groups", "Groups of these batches that were closed without all their samples."
    ),
    "missing_samples": counter("trainer_missing_samples", "Samples that these groups lack."),
    "lost_payloads": counter("trainer_lost_payloads", "Samples whose tokens were lost; they had mask 0."),
}
LENGTH = histogram("trainer_response_length_tokens", "Generated tokens of each sample trained on.")
STALENESS = histogram(
    "trainer_staleness_versions",
    "Staleness, in versions, of the oldest token that bears loss, for each sample trained on.",
)
STALENESS_MAX = gauge(
    "trainer_staleness_max",
    "Maximum staleness of the tokens that bear loss in the last batch, in versions; absent without such tokens.",
)
STALENESS_MEAN = gauge(
    "trainer_staleness_mean",
    "Mean staleness of the tokens that bear loss in the last batch, in versions; absent without such tokens.",
)
BOUND = gauge("trainer_staleness_bound", "Staleness bound of the last batch.")
BATCH = gauge("trainer_batch", "Number of the last batch that the trainer committed.")
TRAIN_VERSION = gauge("trainer_version", "Version of the trainer's weights when this batch was trained.")
WAIT = counter("trainer_wait_seconds", "Time that the trainer waited, for a batch or for other ranks.", "reason")
PUBLISHED = {
    "versions": counter("trainer_published_versions", "Versions that the trainer wrote and announced."),
    "bytes": counter("trainer_published_bytes", "Bytes of these versions."),
    "write_s": counter("trainer_publish_write_seconds", "Time for gathering, writing and reading back these versions."),
    "send_s": counter(
        "trainer_publish_send_seconds", "Time for announcing these versions and sending them to engines."
    ),
    "skipped": counter("trainer_skipped_publications", "Publications refused because weights were NaN or infinite."),
}
REPORTED = gauge("trainer_reported", "Figures reported by `Trainer.report`, by name.", "figure")
EVALUATED = gauge("trainer_evaluated_version", "Last evaluated version.", "dataset")

LENGTHS = {
    kind: slime(f"rollout/response_len/{kind}", f"{said} of the samples of the last batch, in tokens.")
    for kind, said in (
        ("mean", "Mean length"),
        ("median", "Median length"),
        ("max", "Maximum length"),
        ("min", "Minimum length"),
    )
}
TRUNCATED = slime("rollout/truncated_ratio", "Share of the samples of the last batch that ended at a limit.")
REWARD = slime("rollout/raw_reward", "Mean reward of the samples of the last batch.")
SAME = slime(
    "rollout/zero_std/count_{reward}",
    "Groups of the last batch whose samples all have the same reward, by that reward.",
)
FILTERED = slime(
    "rollout/dynamic_filter/drop_{reason}", "Groups that a filter dropped between the previous batch and the last one."
)
DROPPED = slime(
    "rollout/drop_{reason}",
    "Groups disposed of for other reasons between the previous batch and the last one.",
)
UPDATE = slime("perf/update_weights_time", "Duration of the last publication in seconds.")
STEP = slime("perf/step_time", "Seconds between the last two commits.")
TRAIN_WAIT = slime("perf/train_wait_time", "Part of this time in which the trainer waited for a batch, in seconds.")
WAIT_RATIO = slime("perf/wait_time_ratio", "Wait time divided by step time.")
SCORE = slime("eval/{dataset}", "Mean reward on the dataset at its last evaluation.")
EVAL_TRUNCATED = slime("eval/{dataset}-truncated_ratio", "Share of the dataset's answers that ended at a limit.")
EVAL_PASS = slime(
    "eval/{dataset}-pass@{k}",
    "Probability that one of k answers to a prompt has reward 1, averaged over the dataset's prompts; "
    "only with several answers per prompt.",
)
EVAL_MAJORITY = Series(
    "eval_maj_at",
    "gauge",
    "Reward of the majority result of k answers to a prompt, averaged over the dataset's prompts; only "
    "with several answers per prompt.",
    ("dataset", "k"),
)

SERIES = (
    *SUMS.values(), LENGTH, STALENESS, STALENESS_MAX, STALENESS_MEAN, BOUND, BATCH, TRAIN_VERSION, WAIT,
    *PUBLISHED.values(), REPORTED, EVALUATED, *LENGTHS.values(), TRUNCATED, REWARD, SAME, FILTERED, DROPPED, UPDATE,
    STEP, TRAIN_WAIT, WAIT_RATIO, SCORE, EVAL_TRUNCATED, EVAL_PASS,
    EVAL_MAJORITY,
)  # fmt: skip

#: Evaluated row's field -> its series.
_EVALUATION = (("accuracy", SCORE), ("truncated_ratio", EVAL_TRUNCATED), ("version", EVALUATED))
_DROPS = (("rollout/dynamic_filter/drop_", FILTERED), ("rollout/drop_", DROPPED))


class TrainerCollector(Collector):
    """Reads the sums when it is scraped. Called from the server's thread."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        yield from _each(SUMS, tally.sums)
        yield LENGTH.histogram(tally.lengths)
        yield STALENESS.histogram(tally.staleness)
        yield WAIT.each(list(tally.waits.items()))
        yield from _each(PUBLISHED, tally.published)
        yield REPORTED.each(list(tally.reported.items()))
        if tally.published["versions"]:
            yield UPDATE.of(tally.last_publish_s)
        if tally.manifest is not None:
            yield from _batch(tally.manifest)
        yield from self._steps()
        yield from self._drops()
        rows = list(tally.evaluations.items())
        for field, series in _EVALUATION:
            yield series.each([(name, row[field]) for name, row in rows if field in row])
        for begin, series in (("pass@", EVAL_PASS), ("maj@", EVAL_MAJORITY)):
            rates = [(name, key, rate) for name, row in rows for key, rate in row.items() if key.startswith(begin)]
            yield series.each([((name, key.removeprefix(begin)), rate) for name, key, rate in rates])

    def _steps(self) -> Iterator[Metric]:
        step_s, wait_s = self._tally.step_s, self._tally.step_wait_s
        if step_s:
            yield STEP.of(step_s)
            yield TRAIN_WAIT.of(wait_s)
            yield WAIT_RATIO.of(wait_s / step_s)

    def _drops(self) -> Iterator[Metric]:
        drops = list(self._tally.drops.items())
        for begin, series in _DROPS:
            yield series.each([(name[len(begin) :], count) for name, count in drops if name.startswith(begin)])


def _each(series: Mapping[str, Series], sums: Mapping[str, float]) -> Iterator[Metric]:
    return (one.of(sums.get(name, 0)) for name, one in series.items())


def _batch(manifest: Manifest) -> Iterator[Metric]:
    if manifest.num_loss_tokens:
        # Without a loss token there is no staleness: no series is better than 0.
        yield STALENESS_MAX.of(manifest.staleness_max)
        yield STALENESS_MEAN.of(manifest.staleness_mean)
    yield BOUND.of(manifest.bound)
    yield BATCH.of(manifest.n)
    yield TRAIN_VERSION.of(manifest.train_version)
    if rows := manifest.rows:
        for kind, value in lengths_of(rows).items():
            yield LENGTHS[kind].of(value)
        samples = first_rows(rows)
        yield TRUNCATED.of(truncated_ratio(samples))
        yield REWARD.of(sum(row.reward for row in samples) / len(samples))
        yield SAME.each(same_rewards(rows))
