"""Functions that section ``hooks`` names in tests, and rewards that see what those did."""

from typing import Any

from penstock.records.sample import Sample


def masks_the_end(sample: Sample) -> None:
    """No loss on the last token."""
    sample.loss_mask[-1] = 0


async def marks_even_jobs(args: Any, sample: Any, *, evaluation: bool = False) -> Any:
    """slime's form: takes a sample out, and tells the reward what it saw."""
    assert not evaluation
    sample.metadata["seen"] = [args.limit, sample.response_length]
    sample.remove_sample = int(sample.session_id.split("/")[-2]) % 2 == 0
    return sample


def counts_loss(sample: Sample) -> dict[str, Any]:
    return {"score": float(sum(sample.loss_mask)), "seen": sample.seen.metadata["seen"] if sample.seen else None}


def sets_the_reward(sample: Sample) -> None:
    sample.reward = 7.5


def draws_by_itself(sample: Sample) -> None:
    sample.tokens[-1] = 3


def adds_loss(sample: Sample) -> None:
    sample.loss_mask[0] = 1


def halves(sample: Sample) -> None:
    sample.loss_mask = sample.loss_mask[:2]


def exits(sample: Sample) -> None:
    raise SystemExit(3)


def gives_a_word(args: Any, sample: Any) -> str:
    return "done"


async def hangs(sample: Sample) -> None:
    import asyncio

    await asyncio.Event().wait()


def makes_nothing(args: Any, sample: Any, sampling_params: dict[str, Any]) -> None: ...
