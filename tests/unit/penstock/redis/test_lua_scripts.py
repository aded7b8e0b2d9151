"""A script has the function of its verb and the helpers that it uses, each before its use, and nothing else."""

import re
from collections.abc import Iterator

import pytest
import redis

from penstock.redis.call import script
from penstock.redis.lua_scripts import LUA, Definition, definitions, parse, verb_text, with_helpers
from penstock.redis.server import RedisServer

KNOWN = definitions()
VERBS = sorted(name for name, one in KNOWN.items() if one.is_verb)
HELPERS = KNOWN.keys() - set(VERBS)
MAX_LINES = 500


@pytest.fixture(scope="module")
def server(redis_server: RedisServer) -> Iterator["redis.Redis"]:
    client = redis.Redis.from_url(redis_server.url)
    yield client
    client.close()


def code_of(one: Definition) -> str:
    """Code without comments and strings."""
    return re.sub(r"--.*|'[^']*'", "", one.code)


def words_of(one: Definition) -> set[str]:
    """All names in a definition, those of fields too."""
    return set(re.findall(r"\w+", code_of(one)))


def defined_by(one: Definition, among: dict[str, Definition]) -> set[str]:
    return {name for name, other in among.items() if other is one}


@pytest.mark.parametrize("verb", VERBS)
def test_a_script_loads_and_has_the_digest_that_is_sent(verb: str, server: "redis.Redis") -> None:
    assert server.script_load(script(verb).text) == script(verb).sha


@pytest.mark.parametrize("verb", VERBS)
def test_a_script_defines_all_helpers_that_it_uses_before_their_use_and_no_other(verb: str) -> None:
    text = verb_text(verb)
    found = parse(text.removesuffix(f"return {verb}()\n"))
    parts = list(dict.fromkeys(found.values()))

    assert text.endswith(f"\nend\nreturn {verb}()\n")
    assert [name for name in found if name not in HELPERS] == [verb]
    known: set[str] = set()
    for at, one in enumerate(parts):
        own = defined_by(one, found)
        assert words_of(one) & HELPERS <= known | own, f"{own} before what it uses"
        known |= own
        assert verb in own or any(own & words_of(other) for other in parts[at + 1 :]), f"{own} without a use"


def test_each_helper_is_used_by_a_verb() -> None:
    texts = [verb_text(verb) for verb in VERBS]

    assert [name for name in HELPERS if not any(KNOWN[name].code in text for text in texts)] == []


def test_no_name_in_a_definition_hides_a_helper() -> None:
    """Names alone tell what a definition uses: a local variable of the same name would be taken for a use."""
    for one in set(KNOWN.values()):
        code = code_of(one)
        declared = re.findall(r"\b(?:local|for) ([\w, ]+?) ?(?:=|\bin\b|$)", code, re.MULTILINE)
        declared += re.findall(r"\bfunction \w*\(([\w, .]*)\)", code)
        declared += re.findall(r"\blocal function (\w+)", code)
        declared += re.findall(r"[{,]\s*(\w+) = ", code)
        own = defined_by(one, KNOWN)
        assert {name for names in declared for name in names.split(", ")} & HELPERS <= own, own


def test_files_hold_definitions_and_comments_alone_in_the_syntax_that_is_parsed() -> None:
    for file in LUA.iterdir():
        text = file.read_text()
        for one in dict.fromkeys(parse(text).values()):
            assert one.comment + one.code in text
            assert one.code.count("\n") == 1 or re.fullmatch(r"local .*\n(?:(?:  .*)?\n)*end\n", one.code), one.code
            assert not re.search(r"[\"\\]|\[\[|\.\.\w", re.sub(r"'[^']*'", "''", one.code)), one.code
            text = text.replace(one.comment + one.code, "", 1)
        assert re.fullmatch(r"(?:--.*\n)+\n*", text), f"{file.name} begins with a comment on its keys"
        assert "\n-- Keys: " in file.read_text()
        assert file.read_text().count("\n") <= MAX_LINES


def test_helpers_are_defined_before_their_use_in_each_file() -> None:
    for file in LUA.iterdir():
        found, known = parse(file.read_text()), set[str]()
        for name, one in found.items():
            known |= defined_by(one, found)
            assert words_of(one) & HELPERS & found.keys() <= known, f"{name} in {file.name}"


def test_helpers_come_once_and_after_what_they_use() -> None:
    text = with_helpers("lane_key_of", "lane_key_of", "take_entry")

    assert text.count("local function lane_key_of(") == 1
    assert text.index("local function lane_key_of(") < text.index("local function take_entry(")
    assert "local function put_entry(" not in text


@pytest.mark.parametrize("name", ["nothing", "take_entry"])
def test_an_unknown_verb_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no verb: no function of this name"):
        script(name)


def test_a_name_is_defined_once() -> None:
    with pytest.raises(ValueError, match="GROUP is defined twice"):
        parse("local GROUP = 1\nlocal OTHER = 2\n\n-- Again.\nlocal OTHERS, GROUP = 1, 2\n")
