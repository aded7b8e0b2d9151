"""Functions for tests of what section ``hooks`` may name."""

from typing import Any

NUMBER = 3


def plain(sample: Any) -> None: ...


async def of_slime(args: Any, sample: Any, *, evaluation: bool = False) -> None: ...


def of_slime_with_all(args: Any, sample: Any, **about: Any) -> None: ...


def of_three(a: Any, b: Any, c: Any) -> None: ...


def of_verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> None: ...


def of_trl(completions: Any, **columns: Any) -> None: ...


def of_two(a: Any, b: Any) -> None: ...


async def with_judges(sample: Any, judges: Any) -> None: ...


class Scorer:
    def __call__(self, sample: Any) -> None: ...


SCORER = Scorer()


class Answers:
    async def reset(self, job: Any) -> None: ...

    async def step(self, sample: Any) -> None: ...


class Sends:
    receiver = "m:Receives"

    def send(self, transfer: Any) -> None: ...
