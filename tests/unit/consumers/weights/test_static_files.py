"""Who has the token gets ranges of what is announced; nobody gets anything else, and nobody holds the server."""

import contextlib
import logging
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.config import ServingConfig
from penstock.consumers.weights.static_files import FileServer, announced_sizes
from penstock.errors import ConfigError, PublishError
from penstock.weights.index import INDEX_FILE, digest, index_bytes
from tests.integration.fetch_parts import make_version
from tests.integration.parts import until
from tests.unit.consumers.weights.serving_parts import BYTES, OBJECT, TOKEN, ask, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "v00000042"
    made.mkdir()
    (made / "model.safetensors").write_bytes(BYTES)
    (made / "weights.index").write_bytes(b"index")
    return made


@pytest.mark.parametrize(
    ("span", "status", "wanted"),
    [
        (None, 200, BYTES),
        ("0-9", 206, BYTES[:10]),
        ("1000000-", 206, BYTES[1000000:]),
        ("-5", 206, BYTES[-5:]),
        ("10-99999999", 206, BYTES[10:]),
        ("99999999-", 416, b""),
        ("9-3", 416, b""),
        ("0-1,3-4", 416, b""),
    ],
)
def test_a_range_is_the_bytes_that_were_asked_for(folder: Path, span: str | None, status: int, wanted: bytes) -> None:
    with serving(folder) as server:
        found, headers, body = ask(server, f"/{OBJECT}/model.safetensors", span=span)
    assert (found, body) == (status, wanted)
    if status == 206:
        assert headers["Content-Range"].endswith(f"/{len(BYTES)}")


def test_head_says_how_long_a_file_is(folder: Path) -> None:
    with serving(folder) as server:
        status, headers, body = ask(server, f"/{OBJECT}/model.safetensors", method="HEAD")
    assert (status, headers["Content-Length"], headers["Accept-Ranges"], body) == (200, str(len(BYTES)), "bytes", b"")


@pytest.mark.parametrize("token", [None, "", "x" * 32, TOKEN + "x", TOKEN[:-1]])
def test_without_the_token_there_is_nothing(folder: Path, token: str | None) -> None:
    with serving(folder) as server:
        assert ask(server, f"/{OBJECT}/weights.index", token=token)[0] == 401
        assert ask(server, "/", token=token)[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"/{OBJECT}",
        f"/{OBJECT}/",
        f"/{OBJECT}/../secret",
        f"/{OBJECT}/..%2Fsecret",
        f"/{OBJECT}/%2e%2e/secret",
        "/../secret",
        "//secret",
        f"//{OBJECT}/weights.index",
        f"/./{OBJECT}/weights.index",
        f"/{OBJECT}//weights.index",
        "/v00000041-" + "0" * 32 + "/weights.index",
        "/v00000042/weights.index",
    ],
)
def test_nothing_but_files_of_announced_versions_can_be_reached(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_text("secret")
    with serving(folder) as server:
        assert ask(server, path)[0] == 404


def test_other_methods_are_refused(folder: Path) -> None:
    with serving(folder) as server:
        for method in ("PUT", "POST", "DELETE", "OPTIONS"):
            assert ask(server, f"/{OBJECT}/weights.index", method=method)[0] == 405


@pytest.mark.parametrize("how", ["link", "folder", "missing", "size", "index", "hidden"])
def test_a_folder_that_is_not_what_its_index_says_is_not_served(tmp_path: Path, how: str) -> None:
    version = make_version(tmp_path)
    file, index = version.folder / "config.json", version.index
    if how == "size":
        file.write_text("{ }")
    elif how == "index":
        (version.folder / INDEX_FILE).write_bytes(b"another")
    elif how == "hidden":
        (version.folder / ".hidden").write_bytes(b"x")
        data = index_bytes([], {".hidden": 0}, {".hidden": 1})
        (version.folder / INDEX_FILE).write_bytes(data)
        index = digest(data)
    else:
        file.unlink()
    if how == "link":
        file.symlink_to(version.folder / "LICENSE (é, 50%41 #1?).txt")
    elif how == "folder":
        file.mkdir()
    with pytest.raises(PublishError, match=r"is not what its index says|not the index that was announced|invalid name"):
        announced_sizes(1, index, version.folder)


def test_what_the_index_does_not_name_is_not_served(tmp_path: Path) -> None:
    version = make_version(tmp_path)
    (version.folder / "optimizer.pt").write_bytes(b"secret")
    sizes = announced_sizes(1, version.index, version.folder)
    assert sum(sizes.values()) == version.num_bytes
    assert "optimizer.pt" not in sizes


def test_a_file_that_became_a_link_or_another_one_is_not_served(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(b"01234")
    with serving(folder) as server:
        (folder / "weights.index").unlink()
        (folder / "weights.index").symlink_to(secret)
        assert ask(server, f"/{OBJECT}/weights.index")[0] == 404
        (folder / "model.safetensors").write_bytes(b"shorter")
        assert ask(server, f"/{OBJECT}/model.safetensors")[0] == 404


def test_compressed_files_that_were_not_announced_are_not_served(folder: Path) -> None:
    """aiohttp serves FILE.gz to clients that accept it."""
    with serving(folder) as server:
        (folder / "weights.index.gz").write_bytes(b"secret")
        assert ask(server, f"/{OBJECT}/weights.index", **{"Accept-Encoding": "gzip, br"})[0] == 406
        assert ask(server, f"/{OBJECT}/weights.index", **{"Accept-Encoding": "identity"})[2] == b"index"
        assert ask(server, f"/{OBJECT}/weights.index.gz")[0] == 404


def connected(server: FileServer) -> socket.socket:
    at = urlsplit(server.url)
    return socket.create_connection((at.hostname, at.port), timeout=30)


def ends(connection: socket.socket) -> bool:
    """Whether the server cuts it; blocks until it does, or for half a minute."""
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


def test_who_has_not_shown_the_token_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever reaches the port keeps all others out, by connections that say nothing."""
    monkeypatch.setattr("penstock.consumers.weights.static_files.MAX_CONNECTIONS", 3)
    with serving(folder) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(20)]
        held[-1].sendall(f"GET /{OBJECT}/weights.index HTTP/1.1\r\nHost: a\r\n".encode())

        assert ask(server, f"/{OBJECT}/weights.index")[2] == b"index"

        assert all(map(ends, held[:-2])), "the oldest first"
        assert len(server.connections.open) <= 3
        held[-1].sendall(f"Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert held[-1].recv(12) == b"HTTP/1.1 200"


def test_connections_with_the_token_stay_and_a_new_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consumers.weights.static_files.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("penstock.consumers.weights.static_files.STALL_S", 600.0)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(256 * 1024**2)
    (tmp_path / "weights.index").write_bytes(b"index")
    with serving(tmp_path) as server:
        held = [connected(server), connected(server)]
        for one in held:
            one.sendall(f"GET /{OBJECT}/large HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert one.recv(1)
        assert ask(server, f"/{OBJECT}/weights.index")[0] == 503
        assert len(server.connections.open) == 2
        held.pop().close()
        until(lambda: ask(server, f"/{OBJECT}/weights.index")[2] == b"index")
        held.pop().close()


def test_a_client_that_says_nothing_or_half_a_request_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.consumers.weights.static_files.STALL_S", 0.2)
    with serving(folder) as server, connected(server) as silent, connected(server) as half:
        half.sendall(b"GET /" + OBJECT.encode())
        assert ends(silent)
        assert ends(half)


def test_a_head_without_end_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp before 3.14 takes headers for as long as they come."""
    monkeypatch.setattr("penstock.consumers.weights.static_files.STALL_S", 600.0)
    headers = b"".join(b"x%d: %s\r\n" % (number, b"y" * 1000) for number in range(4000))
    with serving(folder) as server, connected(server) as endless:
        with contextlib.suppress(ConnectionError):
            endless.sendall(b"GET / HTTP/1.1\r\n" + headers)
        assert ends(endless)
        assert ask(server, f"/{OBJECT}/weights.index")[2] == b"index"


def test_a_client_that_takes_nothing_is_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consumers.weights.static_files.STALL_S", 0.5)
    size = 256 * 1024**2
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    with serving() as server, connected(server) as slow:
        server.versions[OBJECT] = tmp_path, {"large": size}
        slow.sendall(f"GET /{OBJECT}/large HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert slow.recv(1)
        deadline = time.monotonic() + 30
        while len(server.connections.open) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not len(server.connections.open)
        assert ends(slow)
    assert "Traceback" not in caplog.text


def test_the_rate_bounds_all_clients_together(folder: Path) -> None:
    with serving(folder, bytes_per_s=4 * len(BYTES)) as server:
        began = time.monotonic()
        for _ in range(3):
            ask(server, f"/{OBJECT}/model.safetensors")
        assert time.monotonic() - began >= 0.5, "three quarters of a second, less what a rest saves"


GARBAGE = [
    b"\0\1\2 garbage\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"GET /\xff\xfe%00 HTTP/9.9\r\nHost:\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"GET //[ HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET * HTTP/1.1\r\nRange: bytes=9-1,\xd9\xa3\r\nAuthorization: \xff\r\n\r\n",
    b"CONNECT a:b HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\nExpect: foo\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
]


def test_what_strangers_send_does_not_fill_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serving(folder) as server:
        caplog.clear()
        for garbage in GARBAGE:
            with connected(server) as stranger:
                stranger.sendall(garbage)
                assert ends(stranger)
    assert [record.getMessage() for record in caplog.records] == []


def test_a_mistake_of_our_own_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder) as server:
        monkeypatch.setattr(server, "versions", None)
        assert ask(server, f"/{OBJECT}/weights.index")[0] == 500
    assert "AttributeError" in caplog.text


def test_the_token_is_in_no_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), serving(folder) as server:
        ask(server, f"/{OBJECT}/weights.index")
        ask(server, f"/{OBJECT}/weights.index", token="wrong" * 8)
    assert TOKEN not in caplog.text
    assert "weights are served at http://127.0.0.1:" in caplog.text


def test_tls_is_spoken_where_a_certificate_is_named(folder: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=penstock"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True, timeout=60
    )
    context = ssl.create_default_context(cafile=cert)
    with serving(folder, tls_cert=cert, tls_key=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert ask(server, f"/{OBJECT}/weights.index", tls=context)[2] == b"index"
        with pytest.raises(ssl.SSLError):
            ask(server, f"/{OBJECT}/weights.index", tls=ssl.create_default_context())
        with pytest.raises((ConnectionError, OSError)):
            ask(server, f"/{OBJECT}/weights.index")


def test_what_cannot_be_listened_on_is_a_sentence(tmp_path: Path) -> None:
    with serving() as server, pytest.raises(ConfigError, match=r"serving\.port \d+ cannot be listened on"):
        FileServer(ServingConfig(enabled=True, port=urlsplit(server.url).port or 0), TOKEN)
    with pytest.raises(ConfigError, match=r"serving\.tls_cert .* cannot be used"):
        FileServer(ServingConfig(enabled=True, tls_cert=tmp_path / "no", tls_key=tmp_path / "no"), TOKEN)
    assert os.listdir(tmp_path) == []
