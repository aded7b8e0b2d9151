"""Functions for tests of what section ``hooks`` may name."""

from typing import Any

NUMBER = 3


def plain(sample: Any) -> None: ...


async def of_slime(args: Any, sample: Any, *, evaluation: bool = False) -> None: ...


def of_slime_with_all(args: Any, sample: Any, **about: Any) -> None: ...


def of_three(a: Any, b: Any, c: Any) -> None: ...
