"""What was drawn, and what became of it, as people are shown it."""

from penstock.console.read.lanes import goodput_line, list_tokens
from penstock.protocol.tokens import LaneTokens, of_training, tokens_of

RAW = {
    b"train:heard": b"1000", b"train:trained": b"600", b"train:redrawn": b"50", b"train:filtered:zero_std": b"250",
    b"train:buried": b"0", b"eval:heard": b"70", b"eval:evaluated": b"70",
}  # fmt: skip
STATE = {"tokens": {lane: ledger.to_map() for lane, ledger in tokens_of(RAW, {b"unheard:train": b"3"}).items()}}


def test_the_ledger_holds_what_is_in_no_account() -> None:
    ledger = of_training(tokens_of(RAW))

    assert (ledger.heard, ledger.held, ledger.goodput) == (1000, 100, 0.6)
    assert of_training({}) == LaneTokens()
    assert of_training({}).goodput is None


def test_rows_add_up_to_all_that_was_told_of() -> None:
    rows = list_tokens(STATE)

    shown = [(row["lane"], row["account"], row["tokens"], row["share"]) for row in rows]
    assert shown == [
        ("eval", "evaluated", 70, 1.0), ("train", "trained", 600, 0.6), ("train", "filtered:zero_std", 250, 0.25),
        ("train", "undecided", 100, 0.1), ("train", "redrawn", 50, 0.05),
    ]  # fmt: skip


def test_goodput_is_said_with_what_became_of_the_rest() -> None:
    assert goodput_line(STATE) == (
        "goodput 60.0%: 600 of 1000 tokens were trained on; filtered:zero_std 25.0%, undecided 10.0%, redrawn 5.0%; "
        "tokens of 3 lost requests are unknown"
    )
    assert goodput_line({}) == ""


def test_what_no_verb_wrote_is_left_out() -> None:
    ledger = of_training(tokens_of({b"train:heard": b"9", b"train:trained": b"many", b"\xff": b"1", b"nothing": b"1"}))

    assert (ledger.heard, ledger.trained) == (9, 0)
