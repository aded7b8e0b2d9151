"""Datasets for tests."""

import json
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.producer.dataset import Dataset
from penstock.producer.prompt import Template


def made(folder: Path, rows: list[Any], name: str = "d", template: Template | None = None, **keys: Any) -> Dataset:
    """A dataset of rows, each written as it is where it is text."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Dataset(DatasetConfig(**{"name": name, "path": str(path), "label_key": None, **keys}), template)
