"""Names that people choose, and the lanes: what keys, paths and job ids are made of."""

import re

from penstock.errors import ConfigError

#: Lanes in the order in which workers look at them; ``suspect`` holds jobs that crashed two workers.
LANES = ("suspect", "resume", "eval", "score", "train")

#: Lanes that a producer may admit to.
HOME_LANES = ("eval", "score", "train")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_name(kind: str, name: str) -> str:
    """Return ``name``, or raise ConfigError: names go into keys, paths and job ids."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} {name!r} is not a name: use 1 to 64 letters, digits, '_.-', and begin with a letter or digit."
        )
    return name


#: Most answers of one prompt.
MAX_ANSWERS = 64 * 1024
