"""Write docs/metrics.md, with every metric that a part of penstock serves, from the code that serves them.

``python -m tests.reference.metrics FILE`` writes the page (``make reference``); a test keeps it current.
"""

from collections.abc import Iterator, Sequence

from penstock.buffer import metrics as buffer_metrics
from penstock.console.launch import metrics as launcher_metrics
from penstock.consumers import scorer as scorer_metrics
from penstock.consumers.metrics import recorder as recorder_metrics
from penstock.consumers.metrics import trainer as trainer_metrics
from penstock.metrics import server as server_metrics
from penstock.metrics.series import Series
from penstock.producer import main as producer_metrics
from penstock.workers import metrics as worker_metrics
from penstock.workers.agents.gateway import metrics as gateway_metrics
from penstock.workers.fleet import state as fleet_metrics
from penstock.workers.rewards.pool import metrics as pool_metrics
from tests.reference import write

#: Heading of each section -> its series.
PARTS: dict[str, Sequence[Series]] = {
    "Every part": server_metrics.SERIES,
    "The queue, by the leading buffer": buffer_metrics.SERIES,
    "Producer": producer_metrics.SERIES,
    "Worker": worker_metrics.SERIES,
    "Trainer, by rank 0": trainer_metrics.SERIES,
    "Scorer": scorer_metrics.SERIES,
    "Pool of verifiers": pool_metrics.SERIES,
    "Gateway": gateway_metrics.SERIES,
    "Fleet": fleet_metrics.SERIES,
    "Recorder": recorder_metrics.SERIES,
    "`penstock run`": launcher_metrics.SERIES,
}

_HEAD = """# Metrics

With `metrics.port: 0` every part serves Prometheus metrics on a free port: producer, buffer, workers, trainer (rank 0,
also of a custom trainer), scorers, verifier pools, gateways, fleets, recorder and `penstock run`. Each part publishes
its address in Redis. `penstock run` updates `runs/NAME/targets.json`, so that Prometheus finds parts that start later:

```yaml
scrape_configs:
  - job_name: penstock
    scrape_interval: 5s
    file_sd_configs:
      - files: [/path/to/runs/*/targets.json]
```

For parts that you start separately, `penstock metrics discovery --run NAME --out FILE.json --every 5` writes such a
file. Targets have the labels `run`, `part` and `name`. Parts listen on loopback unless `metrics.host` is set, without a
password. On several machines, set `metrics.host: 0.0.0.0` behind a firewall, and `reached_at` if Prometheus reaches the
machine by another name. With a fixed `metrics.port` only one part can run on a machine, and a fleet serves no metrics,
because its worker uses the port.

A worker reports the use and memory of its GPUs if it starts the engine itself and nvidia-ml-py is installed (`pip
install 'penstock[gpu]'`). A series without a value is absent, never 0.

Parts read values at each scrape, from existing counters. The leading buffer reads those of the queue in a few round
trips on a separate connection. Counters of a process start at 0 with the process; those of the queue are stored in
Redis and start with the run. A batch that is redelivered after a restart counts again in the trainer's counters, but
only once in the queue's.

`console/monitoring/` has a Grafana dashboard (`dashboard.json`, for import) and Prometheus alert rules (`alerts.yml`,
for `rule_files`). The alerts cover no progress, dead letters, a lost worker, staleness at its bound, a starved trainer,
a disk or a Redis that is nearly full, and an append-only file that is not synced. With `engine.args.enable-metrics` the
engines serve SGLang's own series (`sglang:...`) at `/metrics`.

## Names

Series begin with `penstock_`, unless slime has a name for the same value. Then slime's name is used: `/`, `-` and `.`
become `_`, `@` becomes `_at_`, and the variable part becomes a label. So `rollout/response_len/mean` is
`rollout_response_len_mean`, and `eval/aime-truncated_ratio` is `eval_truncated_ratio{dataset="aime"}`. These series are
gauges of the last batch or evaluation. Counters end in `_total`; histograms have `_bucket`, `_sum` and `_count`.
"""

_TAIL = """
`make reference` generates this page from the code.
"""


def page() -> str:
    """Return the complete page."""
    parts = [_HEAD]
    for head, series in PARTS.items():
        parts.append(f"\n## {head}\n\n| series | kind | labels | description |\n|---|---|---|---|\n")
        parts += [f"| `{one.shown_as}` | {one.kind} | {_labels(one)} | {_says(one)} |\n" for one in series]
    return "".join((*parts, _TAIL))


def all_series() -> Iterator[Series]:
    """Yield the series of all parts."""
    return (one for series in PARTS.values() for one in series)


def _labels(series: Series) -> str:
    return ", ".join(f"`{label}`" for label in series.labels)


def _says(series: Series) -> str:
    says = series.says.replace("|", "\\|")
    return f"{says} slime: `{series.slime}`" if series.slime else says


if __name__ == "__main__":
    write(page, "tests.reference.metrics")
