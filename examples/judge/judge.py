"""A reward that no label is needed for: a frozen model works the task out by itself, and its answer is what counts."""

from penstock import Judges, Sample

MAX_NEW_TOKENS = 9


async def agrees(sample: Sample, judges: Judges) -> dict[str, object]:
    """The share of the judge's own digits that stand where it put them; 0 for an answer of another length."""
    wanted = (await judges["critic"].generate(sample.job.prompt or "", max_new_tokens=MAX_NEW_TOKENS)).strip()
    answer = sample.text.strip()
    same = sum(mine == theirs for mine, theirs in zip(answer, wanted, strict=False))
    return {"score": same / len(wanted) if wanted and len(answer) == len(wanted) else 0.0, "wanted": wanted}
