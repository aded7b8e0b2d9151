"""The command line of a module that makes a page of the documentation: ``python -m MODULE FILE``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def write(page: Callable[[], str], module: str, arguments: Sequence[str] | None = None) -> None:
    """Write what ``page`` gives to the file that the command line names; exit code 2 where it names none.

    Args:
        module: how it is called.
        arguments: ``sys.argv[1:]`` when None.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Write a page, from the code.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the page; what was there goes")
    file: Path = parser.parse_args(arguments).file
    try:
        file.write_text(page())
    except OSError as exc:
        parser.error(f"{file} cannot be written ({exc.strerror}): name another file.")
