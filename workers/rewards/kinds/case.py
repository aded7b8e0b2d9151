"""One test of a program: what it is asked, and what is right."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    #: Text on stdin; where a function is called ''.
    stdin: str = ""
    #: Name of the function, and what it is called with; '': the program runs by itself.
    function: str = ""
    arguments: tuple[Any, ...] = ()
    #: Source of that function, where the test brings it along; it stands behind the program.
    asking: str = ""
    #: Text on stdout, or what the function returns; any of them is right.
    expected: tuple[Any, ...] = ()
