"""Set the limits of a jailed process, then run one program written by a model.

Passed to a bare interpreter as text, so it imports only Python's library. One JSON map comes on stdin, its size before
it, and then the program's input. The process holds no secrets, and its output is not trusted: what the program prints,
or its function returns, is compared outside.
"""

import contextlib
import json
import os
import resource
import sys
import types
from typing import Any

#: Names that judges of programming contests import beforehand, if the program contains the word.
HANDY = {
    "typing": "List Dict Set Tuple Optional Union Any Callable Iterable Iterator Sequence Deque DefaultDict Counter",
    "collections": "defaultdict deque Counter OrderedDict namedtuple",
    "functools": "lru_cache cache reduce cmp_to_key partial",
    "itertools": "accumulate permutations combinations product chain groupby count cycle islice zip_longest",
    "heapq": "heappush heappop heapify heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort bisect",
    "math": "inf gcd sqrt ceil floor comb factorial",
}
MODULES = ("math", "re", "string", "random", "collections", "itertools", "functools", "heapq", "bisect", "operator",
           "copy", "typing")  # fmt: skip


def main() -> None:
    """Run the task on stdin."""
    task = json.loads(read(int(read(16))))
    become(task["user"])
    for name, value in task["limits"].items():
        limit(getattr(resource, name), value)
    os.write(2, b"ready\n")
    if task["function"] is None:
        run(task["code"])
    else:
        call(task["code"], task["function"], task["arguments"])


def read(size: int) -> bytes:
    """Read so many bytes from stdin, and no more."""
    found = b""
    while len(found) < size and (piece := os.read(0, size - len(found))):
        found += piece
    return found


def become(user: int | None) -> None:
    """Switch to another user id, if the jail leaves that to this process."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def limit(number: int, value: int) -> None:
    """Set a limit, as far as the hard limit allows."""
    most = resource.getrlimit(number)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(number, (value, value))


def run(code: str) -> None:
    """Run the program as ``__main__``, with the rest of stdin as its input."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.argv = ["answer.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "answer.py", "exec"), module.__dict__)


def call(code: str, name: str, arguments: list[Any]) -> None:
    """Call the function and write its result as JSON; the program's prints go to stderr."""
    output = os.dup(1)
    os.dup2(2, 1)
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    module.__dict__.update(handy(code))
    exec(compile(code, "answer.py", "exec"), module.__dict__)
    owner = module.__dict__.get("Solution")
    function = module.__dict__.get(name)
    if owner is not None and hasattr(owner, name):
        function = getattr(owner(), name)
    if function is None:
        raise NameError(f"there is no function {name!r}")
    text = json.dumps(function(*arguments), default=plain)
    with open(output, "w", encoding="utf-8") as file:
        file.write(text)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


def handy(code: str) -> dict[str, Any]:
    """Return the names that the program may use without importing them."""
    found: dict[str, Any] = {name: __import__(name) for name in MODULES if name + "." in code}
    for module, names in HANDY.items():
        for name in names.split():
            if name in code:
                found.setdefault(name, getattr(__import__(module), name))
    return found


def plain(value: Any) -> Any:
    """Convert numbers and arrays of other libraries to Python's own."""
    for name in ("tolist", "item"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"a {type(value).__name__} is not a value that can be compared")


if __name__ == "__main__":
    main()
