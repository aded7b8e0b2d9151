"""Write docs/internals/waits.md, with every cause of a wait, from the code that reports them.

``python -m tests.reference.waits FILE`` writes the page (``make reference``); a test keeps it current.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.records.causes import REGISTRY, Cause, Unknown, field_names
from tests.reference import write

_HEAD = """# Waits

A part that waits for longer than half a second reports the cause. `penstock why` follows causes from part to part;
`penstock status`, `penstock top` and the page show them, and `penstock_queue_wait_seconds` has them as label `cause`.
With `--json` each has its `name` and `fields`, which stay while texts may change; a cause of another version of
penstock is shown by its name with its fields.

| kind | what it means |
|---|---|
| edge | another part has to act first: `penstock why` continues with what that part waits for |
| end | a person has to act: the end of its text says how |
| work | something runs, or passes by itself |

The clock of a wait belongs to its name and its subject: other values of these fields restart it, counts do not. Texts
are shown with example values.

| name | kind | part | fields (**subject**) | text |
|---|---|---|---|---|
"""

_TAIL = """
This page is made from the code by `make reference`.
"""


def page() -> str:
    """Return the whole page."""
    rows = []
    for name, cause in sorted(REGISTRY.items()):
        if cause is not Unknown:
            example = sample(cause)
            fields = ", ".join(f"**{one}**" if one in cause.subject else one for one in field_names(cause))
            part = example.part.kind if example.part is not None else ""
            rows.append(f"| `{name}` | {cause.kind} | {part} | {fields} | {example} |\n")
    return "".join((_HEAD, *rows, _TAIL))


def sample(cause: type[Cause]) -> Cause:
    """Return a cause with example values."""
    hints = get_type_hints(cause)
    return cause(**{name: _value(name, hints[name]) for name in field_names(cause)})


def _value(name: str, hint: Any) -> Any:
    origin = get_origin(hint) or hint
    if origin is Literal:
        return get_args(hint)[0]
    values: dict[Any, Any] = {str: name.upper(), int: 3, float: 9.0, bool: False}
    if origin is Mapping:
        return {"A": _value("b", get_args(hint)[1])}
    return (name.upper(),) if origin is tuple else values.get(origin, 9.0)


if __name__ == "__main__":
    write(page, "tests.reference.waits")
