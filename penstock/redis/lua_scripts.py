"""The functions in ``penstock/protocol/lua``, and the texts of scripts that are assembled from them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LUA = Path(__file__).parents[1] / "protocol" / "lua"

#: Comment lines, then ``local NAMES = ...`` or ``local function NAME(...)`` with all lines up to the next definition.
_DEFINITION = re.compile(
    r"((?:^--.*\n)*)(^local (?:function )?([\w, ]+?)(?: =|\().*\n(?:(?!--|local ).*\n)*)", re.MULTILINE
)
_COMMENT_OR_STRING = re.compile(r"--.*|'[^'\n]*'")
#: A name of Lua, but not a field of a table (``string.match``).
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or variables at the top level of a Lua file."""

    comment: str
    code: str
    #: All names in its code, its own included.
    names: tuple[str, ...]

    @property
    def is_verb(self) -> bool:
        """Whether it is called from Python, with the keys and arguments that its comment lists."""
        return "\n-- KEYS: " in self.comment


def parse(text: str) -> dict[str, Definition]:
    """Return the definitions in a text by name, in their order. Raises ValueError for a name that has two."""
    found: dict[str, Definition] = {}
    for comment, code, defined in _DEFINITION.findall(text):
        names = tuple(sorted(set(_NAME.findall(_COMMENT_OR_STRING.sub("''", code)))))
        one = Definition(comment, code.rstrip() + "\n", names)
        for name in defined.split(", "):
            if found.setdefault(name, one) is not one:
                raise ValueError(f"{name} is defined twice in the Lua files: rename one of the definitions.")
    return found


@cache
def definitions(folder: Path = LUA) -> dict[str, Definition]:
    """Return the definitions in the Lua files of a folder by name."""
    return parse("\n".join(file.read_text() for file in sorted(folder.glob("*.lua"))))


def with_helpers(*names: str, folder: Path = LUA) -> str:
    """Return the code of these definitions, each after the helpers that it uses. Verbs are no helpers."""
    known = definitions(folder)
    chosen: dict[Definition, None] = {}

    def add(one: Definition) -> None:
        for name in one.names:
            used = known.get(name, one)
            if used != one and not used.is_verb and used not in chosen:
                add(used)
        chosen[one] = None

    for name in names:
        add(known[name])
    return "".join(one.code for one in chosen)


def verb_text(verb: str, folder: Path = LUA) -> str:
    """Return the script of a verb: its helpers, its function and the call of it."""
    one = definitions(folder).get(verb)
    if one is None or not one.is_verb:
        raise ValueError(f"'{verb}' is no verb: no function of this name in {folder} lists its KEYS in its comment.")
    return f"{with_helpers(verb, folder=folder)}return {verb}()\n"
