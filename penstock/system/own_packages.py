"""The packages that penstock installs beside itself, and what happens where a user has files of the same names.

``console``, ``producer``, ``workers``, ``buffer`` and ``consumers`` are common names. Importing penstock puts a finder
first in ``sys.meta_path``:

| who imports one of the names | gets |
|---|---|
| a module of penstock | ours, wherever theirs lie |
| a module of theirs | as ever: theirs where it is first on the path |
| either, while the other's is loaded under that name | one sentence: ImportError, ConfigError on the command line |
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

from penstock.errors import ConfigError

NAMES = frozenset({"console", "producer", "workers", "buffer", "consumers"})
#: The folder that holds all packages of penstock.
HOME = Path(__file__).resolve().parents[2]

_OUR_FILES = tuple(f"{HOME / name}/" for name in ("penstock", *sorted(NAMES)))
#: Files that stand between who imports and the finder: this one, and those that ask it for what they have not.
_BETWEEN = frozenset({str(Path(__file__).resolve()), *(str(HOME / name / "__init__.py") for name in NAMES)})


class Finder:
    """See the module's text."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name, _, inner = fullname.partition(".")
        if name not in NAMES:
            return None
        ours = _importer_is_ours()
        if not inner:
            return PathFinder.find_spec(name, [str(HOME)], target) if ours else None
        if ours and (said := _theirs_is_loaded(name)):
            raise ImportError(said)
        if not ours and not _theirs_is_loaded(name) and PathFinder.find_spec(fullname, path) is None:
            _refuse_theirs(name)
        return None


def install() -> None:
    """Put the finder first; once."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def check_ours(name: str) -> None:
    """Refuse with ConfigError a package of penstock's that is missing, or whose name another module took before."""
    if said := _theirs_is_loaded(name):
        raise ConfigError(said)
    if PathFinder.find_spec(name, [str(HOME)]) is None:
        raise ConfigError(f"The package {name} of penstock is missing: install penstock again.")


def check_importable(module: str) -> None:
    """Raise ImportError where the package of ``module`` is ours and another one took its name before."""
    name = module.partition(".")[0]
    if name in NAMES and (said := _theirs_is_loaded(name)):
        raise ImportError(said)


def missing(package: str, attribute: str) -> Exception:
    """What to raise for an attribute that a package of ours has not: perhaps theirs of the same name was meant."""
    if not attribute.startswith("_") and not _importer_is_ours():
        try:
            _refuse_theirs(package)
        except ImportError as exc:
            return exc
    return AttributeError(f"module {package!r} has no attribute {attribute!r}")


def _refuse_theirs(name: str) -> None:
    if theirs := _file_of_theirs(name):
        raise ImportError(
            f"{theirs} cannot be imported as {name!r}, which is the name of a package of penstock that is loaded "
            f"({HOME / name}): rename yours, or import it from a package of your own (yours.{name})."
        )


def _theirs_is_loaded(name: str) -> str:
    """What to say where another module has our name; ''."""
    module = sys.modules.get(name)
    if module is None:
        return ""
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    if any(place.startswith(_OUR_FILES) or place == str(HOME / name) for place in map(_resolved, filter(None, places))):
        return ""
    return (
        f"penstock needs its package {name!r} ({HOME / name}), and {next(filter(None, places), 'another module')} was "
        f"imported under that name before: rename yours, or import it from a package of your own (yours.{name})."
    )


def _file_of_theirs(name: str) -> str:
    """A file or folder on the path, other than ours, that has the name; ''."""
    elsewhere = [entry for entry in sys.path if _resolved(entry or ".") != str(HOME)]
    spec = PathFinder.find_spec(name, elsewhere)
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def _importer_is_ours() -> bool:
    """Whether the import under way, or the look at an attribute, is in a file of penstock's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        frozen = file.startswith("<frozen importlib") or file.endswith("importlib/__init__.py")
        if not frozen and (file := _resolved(file)) not in _BETWEEN:
            return file.startswith(_OUR_FILES)
        frame = frame.f_back
    return False


def _resolved(path: str) -> str:
    return str(Path(path).resolve())
