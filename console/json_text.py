"""Any value as JSON, whatever others have put into it."""

from typing import Any

import orjson

from penstock.text import to_plain

#: Most values and characters of what JSON cannot say as it is.
MOST = 2**24


def json_bytes(value: Any, option: int = 0) -> bytes:
    """``value`` as UTF-8 JSON. What JSON has no form for (bytes, nesting too deep, lone surrogates) becomes text.

    Args:
        option: of ``orjson.dumps``.

    Raises:
        penstock.text.TooMuch: there is more than ``MOST`` of it, and it has to be made text.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(to_plain(value, MOST), option=option)
