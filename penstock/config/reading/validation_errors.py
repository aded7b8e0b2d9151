"""Explain the errors of pydantic by their type and context; its messages are not parsed, as releases change them."""

from pydantic_core import ErrorDetails

#: Error type -> what the value should be, formatted with the error's context.
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a map of keys",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "greater than or equal to {ge}",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer with fewer digits",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "less than or equal to {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a map of keys",
    "path_type": "a path",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "a string of {min_length} or more characters",
    "string_type": "a string",
    "string_unicode": "a string of valid UTF-8",
    "too_long": "a list of {max_length} or fewer entries",
    "too_short": "a list of {min_length} or more entries",
    "tuple_type": "a list",
}
#: Error type -> what is wrong, where that is not a value of another kind.
_OTHER = {
    "extra_forbidden": "there is no such key",
    "invalid_key": "a key should be a string: put it in quotes",
    "missing": "it is missing",
    "value_error": "{error}",
}


def explain(error: ErrorDetails, value: str = "") -> str:
    """Return what is wrong with a value, without its key; pydantic's message if the error type is not known.

    Args:
        error: one of ``ValidationError.errors()``.
        value: the refused value as text, to show beside what it should be; '': it is not shown.
    """
    kind = error["type"]
    # A bound of a float field is shown as it was written: 1, not 1.0.
    context = {
        name: int(one) if isinstance(one, float) and one.is_integer() else one
        for name, one in error.get("ctx", {}).items()
    }
    if kind in _EXPECTED:
        return f"it should be {_EXPECTED[kind].format(**context)}" + (f", not {value}" if value else "")
    return _OTHER[kind].format(**context) if kind in _OTHER else error["msg"]
