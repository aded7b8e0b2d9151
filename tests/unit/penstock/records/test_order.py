"""Orders of rank 0, as text in Redis."""

import pytest

from penstock.errors import ProtocolError
from penstock.records.publication import MAX_ORDER_BYTES, MAX_REASON, MAX_VERSION, Order

ORDERS = [Order("walk"), Order("done", 1), Order("done", MAX_VERSION), Order("failed", reason="no room: \u00fc done 7")]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_heard_as_it_was_given(order: Order) -> None:
    assert Order.from_text(order.to_text().encode(), "it") == order


@pytest.mark.parametrize("char", ["\U0001f600", "\udc80"])
def test_the_longest_reason_is_cut_and_still_an_order(char: str) -> None:
    text = Order("failed", reason=char * 10 * MAX_REASON).to_text().encode()
    assert len(text) <= MAX_ORDER_BYTES
    assert Order.from_text(text, "it").kind == "failed"


def test_a_reason_moves_no_cursor() -> None:
    assert Order.from_text(b"failed \x1b]0;owned\x07", "it").reason == r"\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"walk on",
        b"done",
        b"done ",
        b"done x",
        b"done 0",
        b"done -7",
        b"done +7",
        b"done 1_0",
        b"done 7\n",
        "done \u0663".encode(),
        b"done 99999999999999999999",
        b"done " + b"9" * 5000,
        b"failed \xff\xfe",
        b"failed " + b"y" * MAX_ORDER_BYTES,
        b"pickle me",
    ],
)
def test_what_is_none_is_refused_by_name_and_shortly(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^What rank 0 of 'a' orders ") as caught:
        Order.from_text(data, "What rank 0 of 'a' orders")
    assert len(str(caught.value)) < 300
