"""Weights on their way to verl's server: what a killed process left is removed, and nothing else."""

from pathlib import Path

from penstock.consumers.adapters.inside_verl.sampling import new_file, remove_left


def test_what_a_killed_process_left_is_removed_and_nothing_of_others(tmp_path: Path) -> None:
    left = [new_file(tmp_path, "verl") for _ in range(2)]
    others = [new_file(tmp_path, "verl-2"), new_file(tmp_path, "other"), tmp_path / "verl-verl-mine.safetensors"]
    for file in (*left, *others):
        file.touch()
    (tmp_path / "v1").mkdir()
    remove_left(tmp_path, "verl")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "v1"])
    remove_left(tmp_path / "not there", "verl")
