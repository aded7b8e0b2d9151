"""The page's files: they keep to the policy that they are sent under, need no network, and come with the wheel."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.console.web import app

FOLDER = (Path(app.__file__).parent / "assets").resolve()
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


TYPES = {"text/html", "text/css", "text/javascript", "image/svg+xml"}


def get(path: str) -> Any:
    return TestClient(app.make_app(Path("runs")), base_url="http://127.0.0.1:8420").get(path)


@pytest.mark.parametrize("name", FILES)
def test_each_is_served_and_asks_for_nothing_elsewhere(name: str) -> None:
    answer = get(f"/assets/{name}")
    text = answer.text
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] in TYPES
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
    for path in ("%2e%2e/app.py", "/etc/passwd", "views/%2e%2e/%2e%2e/app.py", ""):
        assert get(f"/assets/{path}").status_code == 404, path


def test_the_wheel_brings_all_of_them() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["penstock.console"]
    brought = {path for pattern in patterns for path in FOLDER.parents[1].glob(pattern)}
    assert {FOLDER / name for name in FILES} <= brought
