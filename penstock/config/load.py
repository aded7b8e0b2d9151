"""Reading a run's configuration: one YAML file, then the environment, then ``--a.b=c``; the later wins.

Every mistake is a ConfigError of one sentence per key. Secrets (passwords in URLs, tokens among the engine's
variables) are masked in what is saved and printed; ``secret_environment`` hands them to child processes.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from penstock.config import Config
from penstock.config.dataset_path import parse_path
from penstock.config.key_hints import hint as hint_of
from penstock.config.section import Section
from penstock.errors import ConfigError
from penstock.redaction import MASK, has_password, is_secret, know, know_url
from penstock.redaction import redact as redact
from penstock.system.disk import put

#: Variables ``PENSTOCK_A__B`` set ``a.b``; those of tests are no configuration.
ENV_PREFIX = "PENSTOCK_"
ENV_PREFIX_TESTS = "PENSTOCK_TEST_"

Path_ = tuple[str, ...]


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
    values = _read_yaml(path)
    _anchor(values, path.absolute().parent)
    where = dict.fromkeys(_leaves(values), str(path))
    settings = [*_from_environment(os.environ if environ is None else environ), *map(_from_argument, overrides)]
    for key, text, source in settings:
        value = _parse(key, text, source)
        _put(values, key, value, source)
        where |= dict.fromkeys([(*key, *leaf) for leaf in _leaves(value)] or [key], source)
    try:
        config = Config.model_validate(values)
    except ValidationError as exc:
        raise ConfigError("\n".join(_sentences(exc, where, str(path)))) from None
    _remember(config)
    return _absolute(config)


def save_resolved(config: Config, path: Path) -> None:
    """Write the configuration as YAML, secrets masked, replacing ``path`` at once.

    What was not given and follows other keys is told in a comment: those keys can be changed on top of the file.
    """
    values, left = config.model_dump(mode="json"), []
    for name in values:
        section = getattr(config, name)
        for key, value in (section.following() if isinstance(section, Section) else {}).items():
            del values[name][key]
            left.append(f"# {name}.{key}: {json.dumps(value)}\n")
    text = yaml.safe_dump(_masked(values), sort_keys=False, allow_unicode=True)
    told = f"# Not given, for these follow other keys:\n{''.join(left)}" if left else ""
    put(path, f"# Resolved configuration; secrets are masked.\n{told}{text}")


def secret_environment(config: Config) -> dict[str, str]:
    """Variables that put back what ``save_resolved`` masked."""
    values = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key, value in _secrets(values):
        _put(found, key, value, "secrets")
    return {ENV_PREFIX + section.upper(): json.dumps(value) for section, value in found.items()}


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` less the variables that set keys: they are in the resolved file, where arguments may have won."""
    return {name: value for name, value in environ.items() if not _is_setting(name)}


def check_files(config: Config, *, data: bool = True, model: bool = True) -> None:
    """Refuse with ConfigError a configuration whose prompts or first policy are not there."""
    if data:
        for name, sets in (("train", config.data.train), ("eval", config.data.eval)):
            for index, dataset in enumerate(sets):
                file, _, _ = parse_path(dataset.path)
                if not file.is_file():
                    raise ConfigError(f"data.{name}.{index}.path: there is no file {file}; {_make_it(config)}.")
    if model and not Path(config.model.path, "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} is no folder with a config.json; "
            f"{_make_it(config, 'download the model and name its folder')}."
        )


def _make_it(config: Config, otherwise: str = "correct the path") -> str:
    return otherwise if config.prepare is None else f"make it with `penstock prepare`, or {otherwise}"


# A mapping with a key twice keeps the last one in YAML, silently.
class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key} stands twice", problem_mark=key_node.start_mark)
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration {path}; name a YAML file that exists.") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration {path} cannot be read: {exc}.") from exc
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as exc:
        problem = getattr(exc, "problem", None) or "it is no YAML"
        mark = getattr(exc, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"The configuration {path}{line}, cannot be read: {problem}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"The configuration {path} is no map of keys; begin with `run: NAME`.")
    return values


def _anchor(values: dict[str, Any], folder: Path) -> None:
    """Make the YAML's own relative paths absolute, in place; what has the wrong type is left for the check."""
    if isinstance(model := values.get("model"), dict) and isinstance(model.get("path"), str):
        model["path"] = str(folder / model["path"])
    if isinstance(data := values.get("data"), dict):
        for sets in data.values():
            for dataset in sets if isinstance(sets, list) else []:
                if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
                    dataset["path"] = str(folder / dataset["path"])
    for served in _maps(_map(values.get("fleet")).get("models")):
        if isinstance(served.get("model_path"), str):
            served["model_path"] = str(folder / served["model_path"])
    if isinstance(prepare := values.get("prepare"), list) and prepare and isinstance(prepare[0], str):
        prepare[0] = str(folder / prepare[0])


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _maps(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _absolute(config: Config) -> Config:
    """Paths that came by environment or argument are relative to the current directory."""

    def path(value: str) -> str:
        return str(Path(value).absolute())

    data = config.data.model_copy(
        update={
            name: [dataset.model_copy(update={"path": path(dataset.path)}) for dataset in getattr(config.data, name)]
            for name in ("train", "eval")
        }
    )
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
    return config.model_copy(
        update={
            "directory": config.directory.absolute(),
            "model": config.model.model_copy(update={"path": path(config.model.path)}),
            "data": data,
            "engine": engine,
            "trainer": trainer,
            "fleet": config.fleet.model_copy(update={"models": models}),
            "prepare": config.prepare and [path(config.prepare[0]), *config.prepare[1:]],
        }
    )


def _is_setting(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and not name.startswith(ENV_PREFIX_TESTS)


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Path_, str, str]]:
    for name in sorted(environ):
        if _is_setting(name):
            key = tuple(part.lower() for part in name.removeprefix(ENV_PREFIX).split("__"))
            yield key, environ[name], f"the variable {name}"


def _from_argument(argument: str) -> tuple[Path_, str, str]:
    name, equals, text = argument.removeprefix("--").partition("=")
    key = tuple(name.split("."))
    if not equals or not all(key):
        raise ConfigError(f"The argument {redact(argument)!r} sets no key; write it as --a.b=c.")
    return key, text, f"the argument --{name}"


def _parse(key: Path_, text: str, source: str) -> Any:
    """The value of ``text``: YAML where the model leaves the type open or wants a container, else as it stands."""
    annotation = _annotation(key)
    if annotation is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str) and annotation is Any:
        # YAML 1.1 reads 1e-4 as text.
        try:
            return float(value)
        except ValueError:
            return value
    plain = not isinstance(value, dict | list) and value is not None
    if plain and _wants_text(annotation):
        return text
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{'.'.join(key)} ({source}): its keys must be names.")
    return value


def _annotation(key: Path_) -> Any:
    """Type that the model declares at ``key``; Any where it declares none."""
    at: Any = Config
    for part in key:
        if isinstance(at, type) and issubclass(at, BaseModel):
            field = at.model_fields.get(part)
            if field is None:
                return Any
            at = field.annotation
        elif get_origin(at) is dict:
            at = get_args(at)[1]
        elif get_origin(at) is list and part.isdigit():
            at = get_args(at)[0]
        else:
            return Any
    return at


def _wants_text(annotation: Any) -> bool:
    return annotation in (str, Path) or any(_wants_text(part) for part in get_args(annotation))


def _put(values: dict[str, Any], key: Path_, value: Any, source: str) -> None:
    """Set ``a.b.c`` in nested maps and lists; maps are merged."""
    at: Any = values
    for depth, part in enumerate(key[:-1]):
        if isinstance(at, list):
            at = at[_index(at, part, key, source)]
        else:
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
        if not isinstance(at, dict | list):
            raise ConfigError(f"{'.'.join(key)} ({source}): {'.'.join(key[: depth + 1])} is no section.")
    last: Any = key[-1]
    if isinstance(at, list):
        last = _index(at, last, key, source)
    if isinstance(value, dict) and isinstance(old := at[last] if isinstance(at, list) else at.get(last), dict):
        for name, entry in value.items():
            _put(old, (name,), entry, source)
    else:
        at[last] = value


def _index(values: list[Any], part: str, key: Path_, source: str) -> int:
    if not part.isdigit() or int(part) >= len(values):
        raise ConfigError(
            f"{'.'.join(key)} ({source}): {part!r} is no place in a list of {len(values)}; count from 0, "
            "or set the whole list as [..., ...]."
        )
    return int(part)


def _leaves(value: Any, key: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _leaves(entry, (*key, str(name)))
    elif isinstance(value, list) and value:
        for index, entry in enumerate(value):
            yield from _leaves(entry, (*key, str(index)))
    else:
        yield key


def _sentences(exc: ValidationError, where: dict[Path_, str], path: str) -> Iterator[str]:
    seen: set[str] = set()
    for error in exc.errors(include_url=False):
        key = tuple(str(part) for part in error["loc"])
        sentence = _sentence(key, error, where.get(key) or _source(key, error, where, path))
        # A union reports each of its members; the first says enough.
        if ".".join(_declared(key)) not in seen:
            seen.add(".".join(_declared(key)))
            yield sentence


def _source(key: Path_, error: Any, where: dict[Path_, str], path: str) -> str:
    """Where that was set for which a whole section is refused: of the keys that the sentence names, one on top."""
    under = {at: source for at, source in where.items() if at[: len(key)] == key}
    said = str(error.get("ctx", {}).get("error", ""))
    named = [source for at, source in under.items() if re.search(rf"\b{re.escape(at[-1])}\b", said)]
    later = [source for source in named if source != path]
    return next(iter(later or named or (under.values() if key else ())), path)


def _declared(key: Path_) -> Path_:
    return tuple(part for part in key if part.isidentifier() or part.isdigit())


def _sentence(key: Path_, error: Any, source: str) -> str:
    name = ".".join(key)
    match error["type"]:
        case "extra_forbidden":
            near = _nearest(key)
            hint = hint_of(key[-1]) or (f"did you mean {near}?" if near else "remove it.")
            return f"{name} ({source}): there is no such key; {hint}"
        case "missing":
            return f"{name} is missing in {source}; set it."
        case "value_error":
            text = str(error["ctx"]["error"]).rstrip(".")
            end = "" if text.endswith("?") else "."
            return f"{name} ({source}): {text}{end}" if name else f"{text} ({source})."
    said = error["msg"].removeprefix("Input should be ").removeprefix("Value should ")
    shown = "" if key[:1] == ("redis",) else f", not {_shown(error['input'])}"
    return f"{name} ({source}): it should be {said}{shown}."


def _shown(value: Any) -> str:
    text = redact(json.dumps(value, default=str))
    return text if len(text) <= 60 else text[:57] + "..."


def _close(key: Path_) -> str | None:
    """The key of the same section that is spelt nearly so."""
    section = _annotation(key[:-1])
    if isinstance(section, type) and issubclass(section, BaseModel):
        close = difflib.get_close_matches(key[-1], section.model_fields, n=1, cutoff=0.75)
        if close:
            return ".".join((*key[:-1], close[0]))
    return None


def _nearest(key: Path_) -> str | None:
    if close := _close(key):
        return close
    known = [".".join(path) for path in _all_keys(Config)]
    same = [path for path in known if path.rsplit(".", 1)[-1] == key[-1]]
    return next(iter(same or difflib.get_close_matches(".".join(key), known, n=1)), None)


def _all_keys(model: type[BaseModel], prefix: Path_ = ()) -> Iterator[Path_]:
    for name, field in model.model_fields.items():
        at = field.annotation
        if isinstance(at, type) and issubclass(at, BaseModel):
            yield from _all_keys(at, (*prefix, name))
        else:
            yield (*prefix, name)


def _secrets(values: dict[str, Any]) -> Iterator[tuple[Path_, str]]:
    """Keys and values that must not be shown."""
    urls: list[tuple[Path_, Any]] = [
        (("redis", "url"), values["redis"]["url"]),
        (("engine", "url"), values["engine"]["url"]),
    ]
    urls += [(("redis", "payload_servers", name), url) for name, url in values["redis"]["payload_servers"].items()]
    yield from ((key, url) for key, url in urls if url is not None and has_password(url))
    for section in ("env", "args"):
        for name, value in values["engine"][section].items():
            if is_secret(name, value):
                yield ("engine", section, name), value


def _remember(config: Config) -> None:
    """Have the secrets of a configuration masked in whatever this process shows."""
    for key, value in _secrets(config.model_dump(mode="json")):
        if key[0] == "redis" or key[1] == "url":
            know_url(value)
        else:
            know(str(value))


def _masked(values: dict[str, Any]) -> dict[str, Any]:
    for key, value in list(_secrets(values)):
        _put(values, key, MASK if key[1] in ("env", "args") else redact(value), "secrets")
    return values
