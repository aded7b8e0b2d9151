"""Reading a run's configuration: one YAML file, then the environment, then ``--a.b=c``; the later wins. And saving it.

Every mistake is a ConfigError of one sentence per key. Secrets (passwords in URLs, values of ``env`` sections) are
masked in what is saved and printed; ``secret_environment`` passes them to child processes.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.config import Config, DatasetConfig
from penstock.config.engine import default_python
from penstock.config.reading.dataset_path import anchored, is_file, parse_path
from penstock.config.reading.hub import fetch_model, is_hub_id
from penstock.config.reading.mistakes import sentences
from penstock.config.reading.secrets import masked, remember, secrets_of
from penstock.config.reading.settings import (
    ENV_PREFIX,
    Key,
    from_argument,
    from_environment,
    is_setting,
    leaves,
    put,
    value_of,
)
from penstock.config.reading.yaml_file import read_yaml
from penstock.config.section import Section
from penstock.errors import ConfigError
from penstock.system.disk import put as put_file

log = logging.getLogger(__name__)


def anchor(values: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a YAML file absolute, in place; what has the wrong type is left for the check."""
    # What a script prepares is local, also before it exists.
    may_be_id = not values.get("prepare")
    if isinstance(model := values.get("model"), dict) and isinstance(model.get("path"), str):
        model["path"] = _anchored_model(model["path"], folder, may_be_id)
    if isinstance(data := values.get("data"), dict):
        for sets in data.values():
            for dataset in sets if isinstance(sets, list) else []:
                if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
                    dataset["path"] = anchored(dataset["path"], folder, may_be_id=may_be_id)
                if isinstance(dataset, dict) and isinstance(dataset.get("image_folder"), str):
                    dataset["image_folder"] = str(folder / dataset["image_folder"])
    for served in _maps(_map(values.get("fleet")).get("models")):
        if isinstance(served.get("model_path"), str):
            served["model_path"] = _anchored_model(served["model_path"], folder, may_be_id)
    if isinstance(prepare := values.get("prepare"), list) and prepare and isinstance(prepare[0], str):
        prepare[0] = str(folder / prepare[0])


def _anchored_model(path: str, folder: Path, may_be_id: bool) -> str:
    return path if may_be_id and is_hub_id(path, folder) else str(folder / path)


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _maps(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def absolute(config: Config) -> Config:
    """Make paths from environment or arguments absolute, relative to the current directory; fetch models by their ids.

    Blocks for a download. A model that cannot be fetched is logged, and taken for a path.
    """

    def path(value: str) -> str:
        return str(Path(value).absolute())

    here = Path.cwd()

    def model_path(value: str) -> str:
        # The script of ``prepare`` may create it.
        if config.prepare is None and is_hub_id(value, here):
            try:
                return fetch_model(value)
            except ConfigError as exc:  # a plan needs no model; a start checks that it exists
                log.warning("%s", exc)
        return path(value)

    def anchored_set(one: DatasetConfig) -> DatasetConfig:
        images = one.image_folder and path(one.image_folder)
        placed = anchored(one.path, here, may_be_id=config.prepare is None)
        return one.model_copy(update={"path": placed, "image_folder": images})

    sets = {name: list(map(anchored_set, getattr(config.data, name))) for name in ("train", "eval")}
    data = config.data.model_copy(update=sets)
    python = config.engine.python or default_python()
    # A bare name is looked up on the PATH.
    if os.sep in python or (python := shutil.which(python) or python) != config.engine.python:
        python = path(python)
    engine = config.engine.model_copy(update={"python": python})
    models = [
        one.model_copy(update={"model_path": one.model_path and model_path(one.model_path)})
        for one in config.fleet.models
    ]
    trainer = config.trainer
    if trainer.weights_dir is not None:
        trainer = trainer.model_copy(update={"weights_dir": path(trainer.weights_dir)})
    if trainer.delta_store is not None and "://" not in trainer.delta_store:
        trainer = trainer.model_copy(update={"delta_store": path(trainer.delta_store)})
    worker = config.worker
    if worker.copies_dir is not None:
        worker = worker.model_copy(update={"copies_dir": path(worker.copies_dir)})
    serving, agents = (
        section.model_copy(
            update={
                name: value.absolute()
                for name in ("folder", "tls_cert", "tls_key", "tls_ca")
                if (value := getattr(section, name, None)) is not None
            }
        )
        for section in (config.serving, config.agents)
    )
    return config.model_copy(
        update={
            "directory": config.directory.absolute(),
            "model": config.model.model_copy(update={"path": model_path(config.model.path)}),
            "data": data,
            "engine": engine,
            "trainer": trainer,
            "worker": worker,
            "serving": serving,
            "agents": agents,
            "fleet": config.fleet.model_copy(update={"models": models}),
            "prepare": config.prepare and [path(config.prepare[0]), *config.prepare[1:]],
        }
    )


def load_config(path: Path, overrides: list[str], environ: Mapping[str, str] | None = None) -> Config:
    """Read, merge and check a configuration.

    Args:
        path: YAML file. Relative paths in it (data, model, prepare) are relative to its folder; ``directory`` and
            ``engine.python`` are relative to the current directory, and so is everything in ``overrides``.
        overrides: ``--a.b=c`` or ``a.b=c``.
        environ: ``os.environ`` when None.

    Raises:
        ConfigError: one sentence per mistake, naming the key and what to do.
    """
    values = read_yaml(path)
    anchor(values, path.absolute().parent)
    where = dict.fromkeys(leaves(values), str(path))
    settings = [*from_environment(os.environ if environ is None else environ), *map(from_argument, overrides)]
    for key, text, source in settings:
        value = value_of(key, text, source)
        put(values, key, value, source)
        where |= dict.fromkeys([(*key, *leaf) for leaf in leaves(value)] or [key], source)
    try:
        config = Config.model_validate(values)
    except ValidationError as exc:
        raise ConfigError("\n".join(sentences(exc, where, str(path)))) from None
    remember(config)
    return absolute(config)


def save_resolved(config: Config, path: Path) -> None:
    """Write the configuration as YAML, secrets masked, replacing ``path`` atomically.

    Keys that were not given and follow other keys are shown in a comment: those keys can be changed on top of the file.
    """
    values, left = config.model_dump(mode="json"), []
    for name in values:
        section = getattr(config, name)
        for key, value in (section.following() if isinstance(section, Section) else {}).items():
            del values[name][key]
            left.append(f"# {name}.{key}: {json.dumps(value)}\n")
    text = yaml.safe_dump(masked(values), sort_keys=False, allow_unicode=True)
    comment = f"# Not given, for these follow other keys:\n{''.join(left)}" if left else ""
    put_file(path, f"# Resolved configuration; secrets are masked.\n{comment}{text}")


def secret_environment(config: Config) -> dict[str, str]:
    """Return variables that restore what ``save_resolved`` masked, as far as child processes need it."""
    values = config.model_dump(mode="json")
    found: dict[Key, dict[str, Any]] = {}
    for key, _ in secrets_of(values):
        if key[0] == "notify":  # only the process that starts them notifies
            continue
        # A variable sets an item of a list; the names of a map are in its value, which keeps their case.
        variable = key[:4] if key[0] == "data" else key[:1]
        rest, value = _as_far_as_maps_go(values, key, len(variable))
        put(found.setdefault(variable, {}), rest, value, "secrets")
    return {ENV_PREFIX + "__".join(variable).upper(): json.dumps(value) for variable, value in found.items()}


def _as_far_as_maps_go(values: Any, key: Key, start: int) -> tuple[Key, Any]:
    """Return ``key`` from ``start`` on, up to its end or the first list after it, and the value there."""
    for depth, part in enumerate(key):
        if depth > start and isinstance(values, list):
            return key[start:depth], values
        values = values[int(part) if isinstance(values, list) else part]
    return key[start:], values


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without variables that set keys: the resolved file contains them."""
    return {name: value for name, value in environ.items() if not is_setting(name)}


def check_files(config: Config, *, data: bool = True, model: bool = True) -> None:
    """Raise ConfigError if the prompts or the first policy of a configuration do not exist."""
    if data:
        for name, sets in (("train", config.data.train), ("eval", config.data.eval)):
            for index, dataset in enumerate(sets):
                file, _, _ = parse_path(dataset.path)
                if is_file(dataset.path) and not file.is_file():
                    raise ConfigError(f"data.{name}.{index}.path: there is no file {file}; {_make_it(config)}.")
    if model and not Path(config.model.path, "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} is not a folder with a config.json; "
            f"{_make_it(config, 'download the model and name its folder')}."
        )


def _make_it(config: Config, otherwise: str = "correct the path") -> str:
    return otherwise if config.prepare is None else f"make it with `penstock prepare`, or {otherwise}"
