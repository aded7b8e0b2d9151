"""Every seeded defect is one: its patch applies to the source as it is, and what it changes still compiles."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.redis.lua_scripts import definitions, verb_text
from penstock.redis.server import RedisServer
from tests.chaos.checker import PROPERTIES
from tests.chaos.defects import DEFECTS, PATCHES, ROOT, RULES, copy_source, seed

#: What a run finds beside the checker (tests/chaos/run.py).
ELSEWHERE = {"liveness", "rest", "audit", "broken"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("source") / "copy")


@pytest.fixture(scope="module")
def lua(redis_server: RedisServer) -> Iterator["redis.Redis"]:
    client = redis.Redis.from_url(redis_server.url)
    yield client
    client.close()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_changes_code_that_compiles(name: str, tmp_path: Path, lua: "redis.Redis") -> None:
    defect = DEFECTS[name]

    seeded = seed(defect, tmp_path / "seeded")

    changed = [path for path in _files(seeded) if (seeded / path).read_bytes() != (ROOT / path).read_bytes()]
    assert changed, f"{name} changes nothing"
    for path in changed:
        text = (seeded / path).read_text()
        if path.endswith(".py"):
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / path).read_text())), path
        else:
            folder = (seeded / path).parent
            texts = [verb_text(name, folder) for name, one in definitions(folder).items() if one.is_verb]
            assert all(lua.script_load(text) for text in texts), path
            assert set(texts) != {verb_text(name) for name, one in definitions().items() if one.is_verb}, path


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def test_every_patch_has_its_row_and_every_row_names_what_finds_it() -> None:
    assert {path.stem for path in PATCHES.glob("*.patch")} == set(DEFECTS)
    assert len(DEFECTS) >= 12
    for one in DEFECTS.values():
        assert set(one.found_by) <= set(PROPERTIES) | ELSEWHERE, one.name
        assert one.faults > 0, one.name


def test_every_rule_that_a_run_can_break_has_a_seeded_defect() -> None:
    rules = {f"T{number}" for number in (1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 14, 15, 16, 18)}

    assert set(RULES) == rules
    assert {name for names in RULES.values() for name in names} <= set(DEFECTS)


def test_a_copy_is_the_source_and_nothing_else(copy: Path) -> None:
    assert {path.name for path in copy.iterdir()} >= {"penstock", "workers", "buffer", "consumers", "producer"}
    assert not (copy / "tests").exists()
    assert all((copy / path).read_bytes() == (ROOT / path).read_bytes() for path in _files(copy))


def test_a_copy_can_be_run(copy: Path) -> None:
    code = "import penstock, penstock.workers; print(penstock.__file__, penstock.workers.__file__)"
    own = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env=own, capture_output=True, text=True, check=True)

    assert done.stdout.count(str(copy)) == 2
