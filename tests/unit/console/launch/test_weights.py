"""What can be known of the weights' way before a start: TLS, addresses, ports, the store of deltas and folders."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.console.launch.preflight import check_ports, steps_of_weights
from penstock.errors import ConfigError


def config(folder: Path, *, transport: str = "delta", store: str | None = None, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": "r",
            "directory": str(folder),
            "model": {"path": "m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "trainer": {"transport": transport, "delta_store": store},
            **sections,
        }
    )


def check_weights(made: Config, *, claims: bool = False) -> None:
    for _, step in steps_of_weights(made, claims=claims):
        step()


def test_what_can_work_is_fine_and_nothing_is_made(tmp_path: Path) -> None:
    check_weights(config(tmp_path))
    check_weights(config(tmp_path, store=str(tmp_path / "there" / "deltas")))
    check_weights(config(tmp_path, store="memory://deltas"))
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    tls = {"tls_cert": str(tmp_path / "c.pem"), "tls_key": str(tmp_path / "k.pem")}
    with pytest.raises(ConfigError, match=r"tls_cert .*c\.pem and .* cannot be used .*No such file"):
        check_weights(config(tmp_path, transport="disk", serving={"enabled": True, **tls}))
    check_weights(config(tmp_path, serving={"enabled": False, **tls}))


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    host = "192.0.2.1"  # of documentation (RFC 5737)
    with pytest.raises(ConfigError, match=rf"serving\.host {host} cannot be listened on \(.+\): give an address of th"):
        check_weights(config(tmp_path, transport="disk", serving={"enabled": True, "host": host}))


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serving\.port {port} cannot be listened on .*: give another"):
            check_weights(config(tmp_path, transport="disk", serving={"enabled": True, "port": port}))


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("nothing://a/b", "nothing:// cannot be opened: Protocol not known"),
        ("{folder}/file", "is a file: name a folder"),
        ("{folder}/file/below", "is a file: name a folder"),
    ],
)
def test_a_store_of_deltas_that_cannot_be_is_named(tmp_path: Path, store: str, says: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as found:
        check_weights(config(tmp_path, store=store.format(folder=tmp_path)))
    assert str(found.value).startswith("trainer.delta_store ")
    assert says in str(found.value)


def test_folders_that_cannot_be_made_are_named_by_their_keys(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = str(tmp_path / "file")
    served = config(tmp_path, transport="disk", serving={"enabled": True, "folder": file})
    with pytest.raises(ConfigError, match=r"serving\.folder .* is a file: name a folder"):
        check_weights(served)
    with pytest.raises(ConfigError, match=r"worker\.copies_dir .* is a file: name a folder"):
        check_weights(config(tmp_path, worker={"copies_dir": f"{file}/copies"}))
    with pytest.raises(ConfigError, match=r"trainer\.weights_dir .* is a file: name a folder"):
        check_weights(config(tmp_path, trainer={"weights_dir": file}))


def test_folders_of_another_user_are_named_by_their_keys(tmp_path: Path) -> None:
    """Workers take none: who owns it could put other weights there."""
    theirs = Path("/usr")  # for a plain user
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        theirs.chmod(0o755)
        os.chown(theirs, 65534, 65534)
    says = r".* belongs to another user \(uid \d+\)[:;] name another folder"
    served = config(tmp_path, transport="disk", serving={"enabled": True, "folder": theirs})
    with pytest.raises(ConfigError, match=rf"^serving\.folder{says}"):
        check_weights(served)
    with pytest.raises(ConfigError, match=rf"^worker\.copies_dir{says}"):
        check_weights(config(tmp_path, worker={"copies_dir": str(theirs)}))
    if os.geteuid() == 0:  # whom the mode does not keep out; the trainer's may be of whom it likes
        trainer = {"transport": "delta", "weights_dir": str(theirs)}
        check_weights(config(tmp_path, worker={"copies_dir": str(theirs / "ours")}, trainer=trainer))
        assert (theirs.stat().st_mode & 0o777, [*theirs.iterdir()]) == (0o755, []), "nothing is made or closed"


def test_a_folder_of_weights_that_cannot_be_written_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the run has of itself too: an earlier start may have been another user's."""
    folder = tmp_path / "r" / "weights"
    made = config(tmp_path, transport="disk")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    check_weights(made)
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^trainer\.weights_dir .* cannot be written: it has a mode that forbids"):
        check_weights(made)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"weights cannot be written: it belongs to another user \(uid \d+\);"):
        check_weights(made)


def test_one_port_for_the_metrics_of_all_parts_of_a_machine_is_refused(tmp_path: Path) -> None:
    check_ports(config(tmp_path))
    check_ports(config(tmp_path, metrics={"port": 0}))
    check_ports(config(tmp_path, transport="disk", serving={"enabled": True, "port": 9100}))
    with pytest.raises(ConfigError, match=r"metrics\.port is 9100, and penstock run starts several parts"):
        check_ports(config(tmp_path, metrics={"port": 9100}))


@pytest.mark.parametrize("key", ["delta_store", "weights_dir"])
def test_a_folder_in_which_another_run_deletes_is_refused(tmp_path: Path, key: str) -> None:
    def run(name: str) -> Config:
        trainer = {"transport": "delta", key: str(tmp_path / "shared")}
        values = config(tmp_path, trainer=trainer).model_dump(mode="json")
        return Config.model_validate(values | {"run": name})

    check_weights(run("a"), claims=True)
    check_weights(run("a"), claims=True)
    for claims in (False, True):
        with pytest.raises(ConfigError, match=rf"trainer\.{key} .*shared is of run a, which deletes there"):
            check_weights(run("b"), claims=claims)
    (tmp_path / "shared" / ".penstock-run").unlink()
    check_weights(run("b"), claims=True)
    # What is below the folder of the run is of no other.
    check_weights(config(tmp_path), claims=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared"]
