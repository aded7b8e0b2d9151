"""Show something repeatedly: on a terminal in the same place, in a pipe one after another."""

import time
from collections.abc import Callable

from penstock.console.cli.target import Target
from penstock.console.terminal import flush, reader_left, say


def watch(target: Target, every_s: float, show: Callable[[], None]) -> None:
    """Call ``show`` every ``every_s`` seconds, until Ctrl-C or until the reader of the output exits. Blocks.

    Clears the screen of a terminal before each. If Redis does not answer, this is printed, and tried again.
    """
    from redis.exceptions import RedisError
    from rich.console import Console

    from penstock.redis.connect import translate

    console = Console()
    while not reader_left():
        console.clear()
        try:
            show()
        except RedisError as exc:
            say(str(translate(exc, target.url)), err=True)
        flush()
        time.sleep(every_s)
