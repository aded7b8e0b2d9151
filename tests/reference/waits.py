"""Write docs/internals/waits.md, with every cause of a wait by kind, from penstock/records.

``python -m tests.reference.waits FILE`` writes the page (``make reference``); a test keeps it current.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.records.cause import EDGE, END, WORK, Cause, Unknown, field_names
from penstock.records.causes import REGISTRY
from tests.reference import write

_HEAD = """# Waits

A part that waits for longer than half a second reports the cause. `penstock why` traces causes from part to part and
prints each as a sentence. `penstock status`, `penstock top` and the web page show causes too, and
`penstock_queue_wait_seconds` has them as label `cause`. With `--json` each cause has a `name` and `fields`, which stay
the same when sentences are reworded. A cause from another version of penstock is shown by name and fields.

The duration of a wait is measured by cause and **subject** (fields in bold). If the value of a subject field changes,
the clock restarts. `make reference` generates this page from `penstock/records/causes.py` and `worker_causes.py`,
which define the sentences.
"""

_KINDS = {
    EDGE: "Another part must act first; `penstock why` continues with the wait of that part.",
    END: "A person must act; the end of the sentence explains how.",
    WORK: "Work is in progress, or the wait ends by itself.",
}


def page() -> str:
    """Return the complete page."""
    return "".join((_HEAD, *(_table(kind, meaning) for kind, meaning in _KINDS.items())))


def _table(kind: str, meaning: str) -> str:
    rows = [f"\n## {kind}\n\n{meaning}\n\n| cause | part | fields |\n|---|---|---|\n"]
    for name, cause in sorted(REGISTRY.items()):
        if cause.kind == kind and cause is not Unknown:
            fields = ", ".join(f"**{one}**" if one in cause.subject else one for one in field_names(cause))
            example = sample(cause)
            rows.append(f"| `{name}` | {example.part.kind if example.part is not None else ''} | {fields} |\n")
    return "".join(rows)


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
