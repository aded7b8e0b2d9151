"""The stream of events that a page follows."""

from penstock.console.web.replies import Streams


async def test_an_event_comes_when_something_has_changed() -> None:
    states = iter([{"a": 1}, {"a": 1}, {"a": 2}])
    streams = Streams()

    stream = streams.follow("overview", lambda: next(states), every_s=0)

    assert await anext(stream) == b'event: overview\ndata: {"a":1}\n\n'
    assert await anext(stream) == b": as before\n\n"
    assert await anext(stream) == b'event: overview\ndata: {"a":2}\n\n'
    assert streams.num_open == 1
    await stream.aclose()
    assert streams.num_open == 0


async def test_no_text_breaks_out_of_an_event() -> None:
    stream = Streams().follow("overview", lambda: {"a": "x\n\ndata: forged\r\n"}, every_s=0)
    event = await anext(stream)
    assert event.count(b"\n") == 3
    assert b"\r" not in event
    await stream.aclose()
