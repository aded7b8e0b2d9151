"""The stages of a sample, from its admission to the step that trained it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.history.row import SampleRow
from penstock.protocol.records.tries import Try

#: Descriptions of the stages, in the order in which a sample goes through them; ``paused`` lies within prefill
#: and decode.
MEANING = {
    "queued": "its job waits for a worker",
    "starting": "leased, and waits for a slot or an earlier lease's end",
    "prefill": "at the engine, before its first token",
    "decode": "tokens are generated",
    "generate": "at the engine; when its first token came is not known",
    "paused": "held while weights changed or the engine was restarted",
    "reward": "its reward is computed",
    "commit": "written, and committed to the queue",
    "siblings": "waits for the other samples of its group, and for the reward of all of them",
    "cut": "waits to be cut into a batch",
    "train": "cut, until every rank had committed the batch",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a sample (Unix seconds)."""

    name: str
    begin_s: float
    end_s: float


def stages_of(row: SampleRow, tries: Sequence[Try]) -> list[Stage]:
    """Return the known stages of a sample, by time; a stage without its end, or of no length, is left out.

    Args:
        tries: attempts of its job.
    """
    return sorted(_known(row, tries), key=lambda one: (one.begin_s, -one.end_s))


def own_try(row: SampleRow, tries: Sequence[Try]) -> Try | None:
    """Return the lease under which a sample was committed; None if it is unknown."""
    own = [one for one in tries if one.worker == row.worker]
    held = [one for one in own if one.leased_s <= row.committed_s + 1.0] if row.committed_s else own
    return held[-1] if held else None


def begun_s(row: SampleRow, tries: Sequence[Try]) -> float:
    """Return the time of its first request to the engine (Unix seconds); 0: unknown."""
    if row.started_s:
        return row.started_s
    held = own_try(row, tries)
    return held.leased_s if held else row.leased_s


def _known(row: SampleRow, tries: Sequence[Try]) -> Iterator[Stage]:
    begun, first, drawn = begun_s(row, tries), row.first_token_s, row.drawn_s
    leased = tries[0].leased_s if tries else row.leased_s
    yield from _stage("queued", row.admitted_s, leased)
    yield from _stage("starting", leased, begun)
    if begun <= first <= drawn:
        yield from _stage("prefill", begun, first)
        yield from _stage("decode", first, drawn)
    else:
        yield from _stage("generate", begun, drawn)
    for begin, end in (pause for pause in row.pauses if len(pause) == 2):
        yield from _stage("paused", max(begin, begun), min(end, drawn))
    yield from _stage("reward", drawn, row.rewarded_s)
    yield from _stage("commit", row.rewarded_s or drawn, row.committed_s)
    yield from _stage("siblings", row.committed_s, row.ready_s)
    yield from _stage("cut", row.ready_s, row.cut_s)
    yield from _stage("train", row.cut_s, row.trained_s)


def _stage(name: str, begin_s: float, end_s: float) -> Iterator[Stage]:
    if 0 < begin_s < end_s:
        yield Stage(name, begin_s, end_s)
