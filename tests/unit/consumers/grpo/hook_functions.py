"""Functions that section ``hooks`` names for the trainer, in tests."""

from typing import Any

told: list[Any] = []


def ranks_of(batch: Any) -> list[float]:
    """Rewards of the whole batch by their order."""
    order = sorted(row.reward for row in batch.all_rows)
    return [float(order.index(row.reward)) for row in batch.all_rows]


def post_process(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """slime's form."""
    raw = [sample.reward for sample in samples]
    return raw, [args.scale * reward for reward in raw]


def too_few(batch: Any) -> list[float]:
    return [1.0]


def too_large(batch: Any) -> list[float]:
    """Advantages that float32 cannot hold."""
    return [1e39] * len(batch.all_rows)


def first_of_each(args: Any, groups: list[list[Any]]) -> None:
    """slime's form: takes the first sample of each group out."""
    for group in groups:
        group[0].remove_sample = True


def second(batch: Any) -> list[int]:
    return [1]


def none_such(batch: Any) -> list[int]:
    return [len(batch.all_rows)]


def exits(batch: Any) -> list[int]:
    raise SystemExit(3)


def log_step(step: int, row: dict[str, Any], batch: Any) -> bool:
    told.append((step, row["reward_mean"], len(batch.all_rows)))
    return True


def log_rollout_data(
    rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, Any], time_s: float
) -> bool:
    told.append((rollout_id, [sample.response_length for sample in samples], extra_metrics["step"]))
    return False


def log_evaluation(version: int, rows: list[dict[str, Any]]) -> None:
    told.append((version, [row["dataset"] for row in rows]))
