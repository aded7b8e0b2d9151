"""Command line of the modules that generate documentation pages: ``python -m MODULE FILE``."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def write(page: Callable[[], str], module: str, arguments: Sequence[str] | None = None) -> None:
    """Write the result of ``page`` to the file named on the command line; exit code 2 if none is named.

    Args:
        module: name of the module, for the usage message.
        arguments: ``sys.argv[1:]`` when None.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Write a page, from the code.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the page; what was there goes")
    file: Path = parser.parse_args(arguments).file
    try:
        file.write_text(page())
    except OSError as exc:
        parser.error(f"{file} cannot be written ({exc.strerror}): name another file.")
