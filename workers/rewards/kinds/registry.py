"""Built-in rewards by name. A record may name these; none is imported because of it."""

from collections.abc import Iterable

from penstock.config.code_names import BOXED, REMOTE, REWARDS
from penstock.system.extras import check_installed
from penstock.workers.rewards.kinds import ifbench, math_verify
from penstock.workers.rewards.kinds.chance import chance
from penstock.workers.rewards.kinds.code import code
from penstock.workers.rewards.kinds.code import read_label as read_code_label
from penstock.workers.rewards.kinds.dapo import dapo
from penstock.workers.rewards.kinds.exact_match import exact_match
from penstock.workers.rewards.kinds.f1 import f1
from penstock.workers.rewards.kinds.gpqa import gpqa
from penstock.workers.rewards.kinds.kind import Kind
from penstock.workers.rewards.kinds.math_answers import deepscaler, math, read_label

_BOX = "\\boxed{{}}"

#: By name in the configuration. A new name must also be added to ``REWARDS`` in penstock/config/code_names.py, which a
#: test compares with this table; everything else follows from the two.
KINDS: dict[str, Kind] = {
    "exact_match": Kind(exact_match),
    "math_verify": Kind(math_verify.judge, True, math_verify.read_label, boxed=_BOX, package="math_verify"),
    "math": Kind(math, True, read_label, boxed=_BOX, package="math_verify"),
    "deepscaler": Kind(deepscaler, True, read_label, boxed=f"</think>{_BOX}", package="math_verify"),
    "dapo": Kind(dapo, boxed="Answer: {}"),
    "f1": Kind(f1),
    "gpqa": Kind(gpqa),
    "ifbench": Kind(ifbench.ifbench, True, package=ifbench.PACKAGE, load=ifbench.load, reads_metadata=True),
    "code": Kind(code, True, read_code_label, needs_jail=True),
    "random": Kind(chance),
}

#: All names, with their ``boxed_`` variants.
NAMES = (*REWARDS, *(BOXED + name for name in REWARDS))


def kind_of(name: str) -> Kind | None:
    """Return the built-in reward of that name, or None."""
    if found := KINDS.get(name):
        return found
    boxed = KINDS.get(name.removeprefix(BOXED)) if name.startswith(BOXED) else None
    return boxed.of_box() if boxed else None


def is_quick(name: str) -> bool:
    """Return whether the worker computes it itself, even with a verifier pool."""
    kind = kind_of(name)
    return is_remote(name) or (kind is not None and not kind.is_slow)


def needs_jail(names: Iterable[str]) -> bool:
    """Return whether one of these rewards runs code of an answer."""
    return any(kind.needs_jail for name in names if (kind := kind_of(name)))


def is_remote(name: str) -> bool:
    """Return whether a service computes it (remote.py)."""
    return name.removeprefix(BOXED) == REMOTE


def check_packages(names: Iterable[str]) -> None:
    """Raise ConfigError if one of these rewards needs a package that is not installed. Imports nothing."""
    for name in names:
        if (kind := kind_of(name)) and kind.package:
            check_installed(kind.package, f"reward {name}")
