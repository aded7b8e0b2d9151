"""Make paths of a configuration absolute: those of the file by its folder, all others by the current directory."""

import os
import shutil
from pathlib import Path
from typing import Any

from penstock.config import Config, DatasetConfig
from penstock.config.reading.dataset_path import anchored


def anchor(values: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a YAML file absolute, in place; what has the wrong type is left for the check."""
    if isinstance(model := values.get("model"), dict) and isinstance(model.get("path"), str):
        model["path"] = str(folder / model["path"])
    if isinstance(data := values.get("data"), dict):
        for sets in data.values():
            for dataset in sets if isinstance(sets, list) else []:
                if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
                    dataset["path"] = anchored(dataset["path"], folder)
                if isinstance(dataset, dict) and isinstance(dataset.get("image_folder"), str):
                    dataset["image_folder"] = str(folder / dataset["image_folder"])
    for served in _maps(_map(values.get("fleet")).get("models")):
        if isinstance(served.get("model_path"), str):
            served["model_path"] = str(folder / served["model_path"])
    if isinstance(prepare := values.get("prepare"), list) and prepare and isinstance(prepare[0], str):
        prepare[0] = str(folder / prepare[0])


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _maps(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def absolute(config: Config) -> Config:
    """Make paths from environment or arguments absolute, relative to the current directory."""

    def path(value: str) -> str:
        return str(Path(value).absolute())

    here = Path.cwd()

    def anchored_set(one: DatasetConfig) -> DatasetConfig:
        images = one.image_folder and path(one.image_folder)
        return one.model_copy(update={"path": anchored(one.path, here), "image_folder": images})

    sets = {name: list(map(anchored_set, getattr(config.data, name))) for name in ("train", "eval")}
    data = config.data.model_copy(update=sets)
    python = config.engine.python
    # A bare name is looked up on the PATH.
    if os.sep in python or (python := shutil.which(python) or python) != config.engine.python:
        python = path(python)
    engine = config.engine.model_copy(update={"python": python})
    models = [
        one.model_copy(update={"model_path": one.model_path and path(one.model_path)}) for one in config.fleet.models
    ]
    trainer = config.trainer
    if trainer.weights_dir is not None:
        trainer = trainer.model_copy(update={"weights_dir": path(trainer.weights_dir)})
    if trainer.delta_store is not None and "://" not in trainer.delta_store:
        trainer = trainer.model_copy(update={"delta_store": path(trainer.delta_store)})
    worker = config.worker
    if worker.copies_dir is not None:
        worker = worker.model_copy(update={"copies_dir": path(worker.copies_dir)})
    serving = config.serving.model_copy(
        update={
            name: value.absolute()
            for name in ("folder", "tls_cert", "tls_key", "tls_ca")
            if (value := getattr(config.serving, name)) is not None
        }
    )
    return config.model_copy(
        update={
            "directory": config.directory.absolute(),
            "model": config.model.model_copy(update={"path": path(config.model.path)}),
            "data": data,
            "engine": engine,
            "trainer": trainer,
            "worker": worker,
            "serving": serving,
            "fleet": config.fleet.model_copy(update={"models": models}),
            "prepare": config.prepare and [path(config.prepare[0]), *config.prepare[1:]],
        }
    )
