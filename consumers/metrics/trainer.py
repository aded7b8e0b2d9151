"""Export the metrics of one trainer, for complete batches, from its rank 0."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.consumers.metrics.tally import Tally, lengths_of, same_rewards, truncated_ratio
from penstock.metrics.series import Series, families, table
from penstock.records.manifest import Manifest, first_rows

#: By sum of ``Tally``; and by figure of its publications.
SUMS = table("""
    batches counter trainer_batches Batches committed by this process; one that comes again counts again.
    groups counter trainer_groups Groups of these batches.
    samples counter trainer_samples Samples of these batches.
    generated_tokens counter trainer_generated_tokens Tokens of these samples that the policy generated.
    loss_tokens counter trainer_loss_tokens Tokens of these samples that bore loss.
    partial_groups counter trainer_partial_groups Groups of these batches that were closed without all their
        samples.
    missing_samples counter trainer_missing_samples Samples that these groups lack.
    lost_payloads counter trainer_lost_payloads Samples whose tokens were lost; they had mask 0.
""")
PUBLISHED = table("""
    versions counter trainer_published_versions Versions that the trainer wrote and announced.
    bytes counter trainer_published_bytes Bytes of these versions.
    write_s counter trainer_publish_write_seconds Time for gathering, writing and reading back these versions.
    send_s counter trainer_publish_send_seconds Time for announcing these versions and sending them to engines.
    skipped counter trainer_skipped_publications Publications refused because weights were NaN or infinite.
""")
TOTALS = table("""
    lengths histogram trainer_response_length_tokens Generated tokens of each sample trained on.
    staleness histogram trainer_staleness_versions Staleness, in versions, of the oldest token that bears loss, for
        each sample trained on.
    waits counter trainer_wait_seconds{reason} Time that the trainer waited, for a batch or for other ranks.
    reported gauge trainer_reported{figure} Figures reported by `Trainer.report`, by name.
    update_s slime perf/update_weights_time Duration of the last publication in seconds.
    step_s slime perf/step_time Seconds between the last two commits.
    step_wait_s slime perf/train_wait_time Part of this time in which the trainer waited for a batch, in seconds.
    wait_ratio slime perf/wait_time_ratio Wait time divided by step time.
""")
#: Figures of the last batch.
BATCH = table("""
    staleness_max gauge trainer_staleness_max Maximum staleness of the tokens that bear loss in the last batch, in
        versions; absent without such tokens.
    staleness_mean gauge trainer_staleness_mean Mean staleness of the tokens that bear loss in the last batch, in
        versions; absent without such tokens.
    bound gauge trainer_staleness_bound Staleness bound of the last batch.
    n gauge trainer_batch Number of the last batch that the trainer committed.
    train_version gauge trainer_version Version of the trainer's weights when this batch was trained.
    mean slime rollout/response_len/mean Mean length of the samples of the last batch, in tokens.
    median slime rollout/response_len/median Median length of the samples of the last batch, in tokens.
    max slime rollout/response_len/max Maximum length of the samples of the last batch, in tokens.
    min slime rollout/response_len/min Minimum length of the samples of the last batch, in tokens.
    truncated slime rollout/truncated_ratio Share of the samples of the last batch that ended at a limit.
    reward slime rollout/raw_reward Mean reward of the samples of the last batch.
    same slime rollout/zero_std/count_{reward} Groups of the last batch whose samples all have the same reward, by
        that reward.
""")
#: By field of a row of an evaluation; and by prefix of fields that end in k.
EVALUATION = table("""
    accuracy slime eval/{dataset} Mean reward on the dataset at its last evaluation.
    truncated_ratio slime eval/{dataset}-truncated_ratio Share of the dataset's answers that ended at a limit.
    version gauge trainer_evaluated_version{dataset} Last evaluated version.
""")
RATES = table("""
    pass@ slime eval/{dataset}-pass@{k} Probability that one of k answers to a prompt has reward 1, averaged over
        the dataset's prompts; only with several answers per prompt.
""") | {
    "maj@": Series(
        "eval_maj_at",
        "gauge",
        "Reward of the majority result of k answers to a prompt, averaged over the dataset's prompts; only "
        "with several answers per prompt.",
        ("dataset", "k"),
    )
}
#: By prefix of slime's names.
DROPS = table("""
    rollout/dynamic_filter/drop_ slime rollout/dynamic_filter/drop_{reason} Groups that a filter dropped between the
        previous batch and the last one.
    rollout/drop_ slime rollout/drop_{reason} Groups disposed of for other reasons between the previous batch and
        the last one.
""")
TABLES = (SUMS, PUBLISHED, TOTALS, BATCH, DROPS, EVALUATION, RATES)
SERIES = tuple(one for some in TABLES for one in some.values())


class TrainerCollector(Collector):
    """Read the totals on each scrape, in the thread of the metrics server."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally, step_s = self._tally, self._tally.step_s
        yield from families(SUMS, {name: tally.sums.get(name, 0) for name in SUMS})
        yield from families(PUBLISHED, tally.published)
        yield from families(
            TOTALS,
            {
                **{name: getattr(tally, name) for name in ("lengths", "staleness", "waits", "reported")},
                "update_s": tally.last_publish_s if tally.published["versions"] else None,
                "step_s": step_s or None,
                "step_wait_s": tally.step_wait_s if step_s else None,
                "wait_ratio": tally.step_wait_s / step_s if step_s else None,
            },
        )
        if tally.manifest is not None:
            yield from families(BATCH, _batch(tally.manifest))
        drops, rows = list(tally.drops.items()), list(tally.evaluations.items())
        for begin, series in DROPS.items():
            yield series.each([(name[len(begin) :], count) for name, count in drops if name.startswith(begin)])
        for field, series in EVALUATION.items():
            yield series.each([(name, row[field]) for name, row in rows if field in row])
        for begin, series in RATES.items():
            rates = [(name, key, rate) for name, row in rows for key, rate in row.items() if key.startswith(begin)]
            yield series.each([((name, key.removeprefix(begin)), rate) for name, key, rate in rates])


def _batch(manifest: Manifest) -> dict[str, Any]:
    figures = {
        # Without loss tokens, omit staleness instead of exporting 0.
        "staleness_max": manifest.staleness_max if manifest.num_loss_tokens else None,
        "staleness_mean": manifest.staleness_mean if manifest.num_loss_tokens else None,
        **{name: getattr(manifest, name) for name in ("bound", "n", "train_version")},
    }
    if not (rows := manifest.rows):
        return figures
    samples = first_rows(rows)
    return figures | {
        **lengths_of(rows),
        "truncated": truncated_ratio(samples),
        "reward": sum(row.reward for row in samples) / len(samples),
        "same": same_rewards(rows),
    }
