"""Extract the program in an answer."""

import re

from penstock.workers.rewards.kinds.box import after_thoughts

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py", "py3")


def code_block(text: str) -> str:
    """Return the last Python block after a model's thoughts; to the end of the answer if the block is not closed; all
    of the answer if it has no Python block."""
    text = after_thoughts(text)
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text
