"""What ``penstock run`` serves of its processes and disks."""

import os
import time
from pathlib import Path

from penstock.config import Config
from penstock.console.launch.metrics import LauncherCollector
from penstock.system.processes import Child


def config(**metrics: object) -> Config:
    data = {"train": [{"name": "d", "path": "d.jsonl"}]}
    return Config.model_validate({"run": "r", "model": {"path": "m"}, "data": data, "metrics": metrics})


def served(children: list[Child], places: dict[str, Path]) -> dict[tuple[str, str], float]:
    """Name and label -> value."""
    families = LauncherCollector(children, places).collect()
    return {(one.name, next(iter(one.labels.values()))): one.value for family in families for one in family.samples}


def test_processes_are_counted_by_their_starts(tmp_path: Path) -> None:
    child = Child("buffer", ["true"], {}, tmp_path / "log")
    child.start()
    try:
        found = served([child], {})
    finally:
        child.kill()

    assert found["penstock_launcher_process_up", "buffer"] == 1
    assert found["penstock_launcher_process_starts_total", "buffer"] == 1
    assert served([child], {})["penstock_launcher_process_up", "buffer"] == 0


def test_room_is_that_of_the_disk_also_where_a_folder_is_yet_to_be_made(tmp_path: Path) -> None:
    found = served([], {"run": tmp_path, "weights": tmp_path / "r" / "weights"})

    size = found["penstock_launcher_disk_size_bytes", "run"]
    assert 0 < found["penstock_launcher_disk_free_bytes", "run"] <= size
    assert found["penstock_launcher_disk_size_bytes", "weights"] == size


def test_it_is_told_since_when_the_append_only_file_was_not_synced(tmp_path: Path) -> None:
    def told() -> list[float]:
        families = LauncherCollector([], {}, tmp_path).collect()
        return [one.value for family in families for one in family.samples if "redis_synced" in one.name]

    assert told() == [], "no keeper has noted anything yet"
    (tmp_path / "synced").write_text("No space left on device")
    os.utime(tmp_path / "synced", (time.time() - 60,) * 2)
    assert 60 <= told()[0] < 90
