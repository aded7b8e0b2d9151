"""Any value as JSON, whatever others have put into it."""

from typing import Any

import orjson

from penstock.text import to_plain

#: Most values and characters of a value that has no JSON form.
MOST = 2**24


def json_bytes(value: Any, option: int = 0) -> bytes:
    """Encode ``value`` as UTF-8 JSON. What has no JSON form (bytes, deep nesting, lone surrogates) becomes text.

    Args:
        option: of ``orjson.dumps``.

    Raises:
        penstock.text.TooMuch: the value has no JSON form and is larger than ``MOST``.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(to_plain(value, MOST), option=option)
