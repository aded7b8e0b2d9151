"""Rewards of penstock's own by name. A record may name these; none is imported because it does."""

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

#: By the name that a configuration gives. Whoever adds one adds its name to ``REWARDS`` in
#: penstock/config/code_names.py, which a test compares with this table; all else goes by the two.
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

#: All names, those of boxes too.
NAMES = (*REWARDS, *(BOXED + name for name in REWARDS))


def kind_of(name: str) -> Kind | None:
    """The reward of that name; None where it is none of penstock's own."""
    if found := KINDS.get(name):
        return found
    boxed = KINDS.get(name.removeprefix(BOXED)) if name.startswith(BOXED) else None
    return boxed.of_box() if boxed else None


def is_quick(name: str) -> bool:
    """Whether the worker sees to it itself, with a verifier pool too."""
    kind = kind_of(name)
    return is_remote(name) or (kind is not None and not kind.is_slow)


def needs_jail(names: Iterable[str]) -> bool:
    """Whether one of these rewards runs what an answer wrote."""
    return any(kind.needs_jail for name in names if (kind := kind_of(name)))


def is_remote(name: str) -> bool:
    """Whether a service computes it (remote.py)."""
    return name.removeprefix(BOXED) == REMOTE


def check_packages(names: Iterable[str]) -> None:
    """Raise ConfigError where one of these rewards needs what is not installed here. Imports nothing."""
    for name in names:
        if (kind := kind_of(name)) and kind.package:
            check_installed(kind.package, f"reward {name}")
