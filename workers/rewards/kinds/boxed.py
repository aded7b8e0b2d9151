"""Extract the last ``\\boxed{}`` of a text, and the text after a model's thoughts."""

MARK = "\\boxed"
END_OF_THOUGHTS = "</think>"


def after_thoughts(text: str) -> str:
    r"""Return the text after the last ``</think>``; all of it if there is no such mark."""
    return text.rpartition(END_OF_THOUGHTS)[2]


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}``; None if there is none, or it is not closed.

    ``\{`` and ``\}`` do not count as braces.
    """
    begin = text.rfind(MARK)
    if begin < 0 or not text.startswith("{", begin + len(MARK)):
        return None
    begin += len(MARK) + 1
    end = closing_brace(text, begin)
    return None if end is None else text[begin:end]


def closing_brace(text: str, at: int) -> int | None:
    """Return the index of the brace that closes the one opened before ``at``; None if it is not closed."""
    depth, escaped = 1, False
    for index in range(at, len(text)):
        character = text[index]
        depth += 0 if escaped else (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if not depth:
            return index
    return None
