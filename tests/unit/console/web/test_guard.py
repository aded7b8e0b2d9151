"""Who may ask the page's server, and what a browser may do with its answers."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from penstock.console.web.app import make_app
from penstock.console.web.guard import MAX_BODY
from tests.unit.console.web.run_files import make_run

HERE = "http://127.0.0.1:8420"
TOKEN = "t0ken"


def client(directory: Path, *, host: str = HERE, token: str | None = None) -> TestClient:
    return TestClient(make_app(directory, token=token), base_url=host)


@pytest.mark.parametrize("host", [HERE, "http://localhost:8420", "http://localhost", "http://[::1]:8420"])
def test_names_of_loopback_are_answered(tmp_path: Path, host: str) -> None:
    assert client(tmp_path, host=host).get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    "host", ["testserver", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil:1", "", "10.0.0.1"]
)
def test_another_host_is_refused_whatever_is_asked(tmp_path: Path, host: str) -> None:
    make_run(tmp_path)
    for path in ("/", "/assets/main.js", "/api/runs", "/api/runs/demo/overview"):
        answer = client(tmp_path).get(path, headers={"host": host})
        assert (answer.status_code, "demo" in answer.text) == (403, False), path


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:8420"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "https://127.0.0.1:8420"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
    ids=str,
)
def test_another_site_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    answer = client(tmp_path).get("/api/runs", headers=headers)
    assert (answer.status_code, answer.json()["error"][:12]) == (403, "Another site")


def test_the_page_itself_and_a_link_to_it_are_answered(tmp_path: Path) -> None:
    own = {"origin": HERE, "sec-fetch-site": "same-origin"}
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client(tmp_path).get("/api/runs", headers=own).status_code == 200
    assert client(tmp_path).get("/", headers=visit).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_changed_without_actions(tmp_path: Path, method: str) -> None:
    answer = client(tmp_path).request(method, "/api/runs/demo/lane", headers={"x-penstock-token": ""})
    assert answer.status_code == 403


@pytest.mark.parametrize("given", [None, "", "t0ke", "t0ken2", "T0KEN"])
def test_an_action_needs_the_token_in_its_header(tmp_path: Path, given: str | None) -> None:
    make_run(tmp_path)
    wish = {"lane": "eval", "closed": True}
    acting = client(tmp_path, token=TOKEN)
    acting.cookies.set("x-penstock-token", TOKEN)
    headers = {} if given is None else {"x-penstock-token": given}
    answer = acting.post(f"/api/runs/demo/lane?token={TOKEN}", json=wish, headers=headers)
    assert answer.status_code == 401
    # With it the request gets as far as the run, which has no Redis.
    answer = acting.post("/api/runs/demo/lane", json=wish, headers={"x-penstock-token": TOKEN})
    assert (answer.status_code, "No Redis is known" in answer.json()["error"]) == (400, True)


def test_a_long_body_is_refused_before_it_is_read(tmp_path: Path) -> None:
    answer = client(tmp_path, token=TOKEN).post(
        "/api/runs/demo/lane", content=b"x" * (MAX_BODY + 1), headers={"x-penstock-token": TOKEN}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/", "/assets/main.js", "/api/runs", "/api/runs/none/curves", "/nowhere"])
def test_every_answer_says_what_a_browser_may_do_with_it(tmp_path: Path, path: str) -> None:
    headers = client(tmp_path).get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
