"""Parts of a run that start in the same instant leave its configuration in one folder, and none fails of another."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from penstock.config import Config
from penstock.redis.saved_config import CONFIG_FILE, keep_config
from penstock.redis.server import read_addresses, write_address

PARTS, TIMES = 4, 100


@pytest.fixture
def config(tmp_path: Path) -> Config:
    values = {
        "run": "r",
        "directory": tmp_path / "runs",
        "redis": {"url": "redis://:pw-4f6e2@host:1", "payload_servers": {"p": "redis://:pw-9d1c7@host:2"}},
        "model": {"path": "none"},
        "data": {"train": [{"name": "d", "path": "none.jsonl"}]},
    }
    return Config.model_validate(values)


def together(work: Callable[[], object]) -> None:
    """Every part does its work, so often that two of them meet at every line."""
    barrier = threading.Barrier(PARTS, timeout=60)

    def part() -> None:
        try:
            for _ in range(TIMES):
                barrier.wait()
                work()
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(PARTS) as pool:
        for done in [pool.submit(part) for _ in range(PARTS)]:
            done.result()


def test_parts_that_start_together_all_leave_their_configuration(config: Config, tmp_path: Path) -> None:
    together(lambda: keep_config(config, tmp_path / "run.yaml", replace=True))
    folder = config.run_dir
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, "redis.json"], "nothing is left over"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert read_addresses(folder).url == "redis://:pw-4f6e2@host:1"
    assert yaml.safe_load((folder / CONFIG_FILE).read_text())["run"] == "r"


def test_whoever_reads_an_address_while_it_is_written_finds_a_whole_one(config: Config) -> None:
    folder = config.run_dir
    folder.mkdir(parents=True)
    urls = ["redis://host:1", f"redis://{'h' * 500}:2"]
    write_address(folder, urls[0])

    def work() -> None:
        for url in urls:
            write_address(folder, url)
            assert read_addresses(folder).url in urls

    together(work)
