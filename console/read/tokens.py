"""The ledger of tokens (I10), for command line, page and metrics: tokens generated, by outcome."""

from collections.abc import Mapping
from typing import Any

from penstock.names import Lane
from penstock.protocol.tokens import TRAINED, ledgers_of

#: Pseudo-account of tokens in live groups, whose outcome is open.
UNDECIDED = "undecided"


def list_tokens(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per account of a snapshot's ledger, by lane, largest first.

    Including ``undecided`` they add up to all reported tokens. ``share``: of these, from 0 to 1.
    """
    rows = []
    for lane, ledger in ledgers_of(state).items():
        accounts = {**ledger.accounts, UNDECIDED: ledger.held}
        for account, tokens in sorted(accounts.items(), key=lambda one: (-one[1], one[0])):
            share = tokens / ledger.heard if ledger.heard else 0.0
            rows.append({"lane": lane, "account": account, "tokens": tokens, "share": round(share, 4)})
    return [row for row in rows if row["tokens"]]


def goodput_line(state: Mapping[str, Any]) -> str:
    """Return the share of the tokens generated for training that was trained on, and the rest by account; or ''."""
    ledger = ledgers_of(state).get(Lane.TRAIN)
    if ledger is None or ledger.goodput is None:
        return ""
    rest = [
        f"{row['account']} {row['share']:.1%}"
        for row in list_tokens(state)
        if row["lane"] == Lane.TRAIN and row["account"] != TRAINED
    ]
    words = f"; {', '.join(rest)}" if rest else ""
    said = f"goodput {ledger.goodput:.1%}: {ledger.trained} of {ledger.heard} tokens were trained on{words}"
    if ledger.unheard:
        said += f"; tokens of {ledger.unheard} lost requests are unknown"
    return said
