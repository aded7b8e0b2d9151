"""Every rank divides its loss by the counts of the whole batch (T10).

The counts are made anew from what was committed and from the masks of the manifest.
"""

from collections.abc import Iterator
from typing import Any

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_wrong_denominators(evidence: Evidence) -> Iterator[Violation]:
    """Yield batches whose manifest counts other loss tokens than were committed, and ranks with other counts."""
    loss = {
        (one.facts["job"], k, one.facts["token"]): pairs
        for one in evidence.history.of("commit")
        if one.may_have_happened
        for (k, _), pairs in zip(one.facts["samples"], one.facts["loss"], strict=True)
    }
    for cut in evidence.history.of("cut"):
        if cut.happened:
            yield from _wrong_rows(cut, loss)
            yield from _differing(cut, cut.facts["counts"], _counts_of(cut))
    for told in evidence.history.of("counts"):
        batch = evidence.cut_of(told)
        if batch is not None:
            yield from _differing(told, told.facts["counts"], _counts_of(batch), batch)


def _wrong_rows(cut: Operation, loss: dict[tuple[str, int, str], list[list[int]]]) -> Iterator[Violation]:
    facts = cut.facts
    # A sample of several parts has a row for each.
    found: dict[tuple[str, int, str], tuple[int, dict[str, Any]]] = {}
    for (job, k, token), (_, _, num_loss, about) in zip(facts["rows"], facts["scored"], strict=True):
        found[job, k, token] = found.get((job, k, token), (0, {}))[0] + num_loss, about
    for (job, k, token), (num_loss, about) in found.items():
        pairs = loss.get((job, k, token))
        if pairs is None or about["lost"]:
            continue
        floor = facts["mask_below"]
        if facts["mask_offpolicy"]:
            floor = max(floor, about["newest"])
        wanted = sum(count for version, count in pairs if version >= floor)
        if facts["mask_truncated"] and about["status"] == "truncated":
            wanted = 0
        if num_loss != wanted:
            what = f"sample {job}/{k} has {num_loss} loss tokens in batch {facts['n']} of {facts['sub']}"
            yield Violation(f"{what}, and {wanted} were committed that bear loss", proof(cut))


def _counts_of(cut: Operation) -> dict[str, int]:
    """Return the denominators of a batch, by its rows."""
    scored = cut.facts["scored"]
    return {
        "loss_tokens": sum(num_loss for _, _, num_loss, _ in scored),
        "loss_samples": sum(num_loss > 0 for _, _, num_loss, _ in scored),
        "samples": len(scored),
        "groups": len({job for job, *_ in scored}),
    }


def _differing(
    one: Operation, found: dict[str, Any], wanted: dict[str, int], *others: Operation
) -> Iterator[Violation]:
    for name, count in found.items():
        if name in wanted and count != wanted[name]:
            what = f"{one.op}: batch {one.facts['n']} of {one.facts['sub']} is divided by {count} {name}"
            yield Violation(f"{what}, and has {wanted[name]}", proof(one, *others))
