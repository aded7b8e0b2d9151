"""Connections of TLS that end at any moment leave a free place; a key that asks for a passphrase is refused."""

import contextlib
import socket
import ssl
import struct
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.config import ServingConfig
from penstock.consumers.weights.static_files import FileServer
from penstock.errors import ConfigError
from penstock.weights.serving import server_context
from tests.unit.consumers.weights.serving_parts import OBJECT, TOKEN, ask, serving

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=penstock"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True, timeout=60
    )
    return cert, key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights.index").write_bytes(b"index")
    return tmp_path


def connected(server: FileServer) -> socket.socket:
    at = urlsplit(server.url)
    return socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S)


def answers(server: FileServer, context: ssl.SSLContext) -> None:
    """Wait for a free place, and be served."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert ask(server, f"/{OBJECT}/weights.index", tls=context)[2] == b"index"
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_handshakes_are_bounded_in_number(
    folder: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client without the token could take every file handle of the trainer."""
    monkeypatch.setattr("penstock.consumers.weights.static_files.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("penstock.consumers.weights.static_files.STALL_S", 600.0)
    context = ssl.create_default_context(cafile=pair[0])
    tls = {"tls_cert": pair[0], "tls_key": pair[1]}
    with serving(folder, **tls) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(20)]
        assert ask(server, f"/{OBJECT}/weights.index", tls=context)[2] == b"index"
        for index, one in enumerate(held[:-2]):
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b"", f"{index}: the oldest are closed"


def test_who_goes_in_the_middle_leaves_a_free_place(
    folder: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consumers.weights.static_files.MAX_CONNECTIONS", 4)
    context = ssl.create_default_context(cafile=pair[0])
    with serving(folder, tls_cert=pair[0], tls_key=pair[1]) as server:
        for number in range(40):
            try:
                plain = connected(server)
                if number % 2:
                    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                else:
                    plain = context.wrap_socket(plain, server_hostname="127.0.0.1")
            except OSError:
                continue  # all places are taken
            # Closed by a reset.
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            plain.close()
        answers(server, context)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(folder: Path, pair: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(cafile=pair[0])
    with serving(folder, tls_cert=pair[0], tls_key=pair[1]) as server, connected(server) as plain:
        came, going = ssl.MemoryBIO(), ssl.MemoryBIO()
        secure = context.wrap_bio(came, going, server_hostname="127.0.0.1")
        while True:
            try:
                secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(going.read())
                came.write(plain.recv(1 << 16))
        secure.write(
            f"GET /{OBJECT}/weights.index HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        plain.sendall(going.read())
        answer = b""
        while b"index" not in answer:
            came.write(plain.recv(1 << 16))
            with contextlib.suppress(ssl.SSLWantReadError):
                while part := secure.read(1 << 16):
                    answer += part
        assert answer.startswith(b"HTTP/1.1 200")


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    key = tmp_path / "key.pem"
    command = f"openssl pkey -in {pair[1]} -out {key} -aes256 -passout pass:secret"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    with pytest.raises(ConfigError, match=r"serving\.tls_key .* has a passphrase: take it off"):
        server_context(ServingConfig(enabled=True, tls_cert=pair[0], tls_key=key))
