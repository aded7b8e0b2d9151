"""One test of a program: its input, and the expected results."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    #: Text on stdin; '' if a function is called.
    stdin: str = ""
    #: Name and arguments of the function; '': the program runs by itself.
    function: str = ""
    arguments: tuple[Any, ...] = ()
    #: Source of that function, if the test defines it; it is appended to the program.
    asking: str = ""
    #: Expected text on stdout, or return value; any of them is right.
    expected: tuple[Any, ...] = ()
