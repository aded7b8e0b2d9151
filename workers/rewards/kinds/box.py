"""The last ``\\boxed{}`` of a text, and what follows a model's thoughts."""

MARK = "\\boxed"
END_OF_THOUGHTS = "</think>"


def after_thoughts(text: str) -> str:
    r"""What follows the last ``</think>``; all of it where there is none."""
    return text.rpartition(END_OF_THOUGHTS)[2]


def last_box(text: str) -> str | None:
    r"""What is inside the last ``\boxed{}``; None where there is none, or where it is not closed.

    ``\{`` and ``\}`` open and close nothing.
    """
    begin = text.rfind(MARK)
    if begin < 0 or not text.startswith("{", begin + len(MARK)):
        return None
    begin += len(MARK) + 1
    end = closing_brace(text, begin)
    return None if end is None else text[begin:end]


def closing_brace(text: str, at: int) -> int | None:
    """Index of the brace that closes what is open at ``at``; None where none does."""
    depth, escaped = 1, False
    for index in range(at, len(text)):
        character = text[index]
        depth += 0 if escaped else (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if not depth:
            return index
    return None
