"""The page's files: they keep to the policy that they are sent under, need no network, and come with the wheel."""

import re
import tomllib
from pathlib import Path

import pytest

from penstock.console.web import app
from penstock.console.web.app import asset
from penstock.console.web.replies import NotThere

FOLDER = (Path(app.__file__).parent / "assets").resolve()
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


@pytest.mark.parametrize("name", FILES)
def test_each_is_served_and_asks_for_nothing_elsewhere(name: str) -> None:
    answer = asset(name)
    text = bytes(answer.body).decode()
    assert answer.media_type is not None
    links = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert links == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_of_text(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_import_is_there(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    for found in re.findall(r"from \"(\.[^\"]+)\"", text):
        assert (FOLDER / name).parent.joinpath(found).resolve().is_relative_to(FOLDER)
        assert (FOLDER / name).parent.joinpath(found).is_file(), found


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\ssrc=)[^>]*>|<style|\sstyle=|\son\w+=", text) == []


def test_the_page_asks_for_all_modules_at_once() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r"/assets/([\w/]+\.js)", text)
    assert sorted(loaded) == sorted(SCRIPTS)


def test_a_path_out_of_the_folder_leads_nowhere() -> None:
    for path in ("../app.py", "/etc/passwd", "views/../../app.py", "main.js/", ""):
        with pytest.raises(NotThere):
            asset(path)


def test_the_wheel_brings_all_of_them() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["penstock.console"]
    brought = {path for pattern in patterns for path in FOLDER.parents[1].glob(pattern)}
    assert {FOLDER / name for name in FILES} <= brought
