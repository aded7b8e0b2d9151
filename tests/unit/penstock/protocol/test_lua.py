"""A verb names its KEYS and ARGV once, in its first lines, as its header lists them."""

import re
import textwrap

import pytest

from penstock.redis.lua_scripts import definitions

KNOWN = definitions()
VERBS = sorted(name for name, one in KNOWN.items() if one.is_verb)

POSITION = re.compile(r"\b(KEYS|ARGV)\[(\d+)\]")
#: A position without a name: of one argument, or of where those whose number varies begin.
UNNAMED = re.compile(
    r"(KEYS|ARGV)\[(\d|\w+ - [2-9])"  # ARGV[7], ARGV[i - 4]
    r"|= [1-9]\d*, #(KEYS|ARGV)"  # for i = 4, #ARGV
    r"|#(KEYS|ARGV) [-+<>=~]+ \d(?!\))"  # #KEYS < 4
    r"|\((KEYS|ARGV), [^)]*\b\d"  # gates_of(KEYS, 4, numbers)
)


def parts(verb: str) -> tuple[str, list[str], list[str]]:
    """Header, lines that bind, and the lines after them."""
    first, *body, last = KNOWN[verb].code.splitlines()
    assert (first, last) == (f"local function {verb}()", "end")
    rest = textwrap.dedent("\n".join(body)).splitlines()
    end = rest.index("") if POSITION.search(rest[0]) or re.match(r"local first_\w+ = \d+$", rest[0]) else 0
    return KNOWN[verb].comment, rest[:end], rest[end:]


def listed(header: str, what: str) -> tuple[int, bool]:
    """How many arguments the header lists before those whose number varies, and whether there are such."""
    found = re.search(rf"^-- {what}: (.*?)(?=^-- \w+: |^-- Returns|\Z)", header, re.M | re.S)
    assert found is not None, f"no {what} in the header"
    text = re.sub(r"\([^)]*\)", "", found[1].replace("\n--", " "))
    fixed, *tail = re.split(r"(?:^|, *)\b(?:then|each)\b", text, maxsplit=1)
    names = [name for name in fixed.split(",") if name.strip() not in ("", "none")]
    return (0 if "unused" in found[1] else len(names)), bool(tail)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_binds_what_its_header_lists_in_its_order(verb: str) -> None:
    header, bindings, _ = parts(verb)
    text = "\n".join(bindings)
    assert all(re.match(r"local [\w, ]+ = ", line) for line in bindings), "only bindings before the first empty line"
    for what in ("KEYS", "ARGV"):
        number, _ = listed(header, what)
        bound = [int(at) for name, at in POSITION.findall(text) if name == what]
        assert bound == list(range(1, number + 1)), f"{what} of the header"
    firsts = [int(n) for n in re.findall(r"^local first_\w+ = (\d+)$", text, re.M)]
    tails = [number + 1 for number, varies in (listed(header, "KEYS"), listed(header, "ARGV")) if varies]
    assert [n for n in firsts if n not in tails] == [], "a tail begins behind what is listed before it"


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_uses_names_after_its_first_lines(verb: str) -> None:
    *_, body = parts(verb)
    assert [line for line in body if UNNAMED.search(line)] == []
