"""Signatures of the functions in section ``hooks``: a Protocol for each key, and the accepted parameters."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import ConfigError
from penstock.records.sample import Sample
from penstock.system.user_code import find


class SampleHook(Protocol):
    """``hooks.sample``: called with each generated sample before its reward.

    It may remove loss from tokens (``sample.loss_mask``), and set ``sides`` and ``reward``; tokens, logprobs, versions
    and the mask of generated tokens must not change (T6, T8).
    """

    def __call__(self, sample: Sample, /) -> Awaitable[None] | None: ...


class GenerateHook(Protocol):
    """``hooks.generate`` and ``hooks.eval``: makes one sample, as slime's custom generate functions do.

    ``args.engine.generate(input_ids, sampling_params)`` sends a request to the worker's engine, and so does a POST to
    ``/generate`` at ``args.sglang_router_ip`` and ``args.sglang_router_port``. It returns the sample with ``tokens``,
    ``response_length``, ``response``, ``loss_mask`` and ``status`` set; tokens with loss must come from such requests.
    """

    async def __call__(self, args: Any, sample: Any, sampling_params: dict[str, Any], /) -> Any: ...


class RolloutHook(Protocol):
    """``hooks.rollout``: makes the samples of a group together.

    ``args.each[i]`` is the ``args`` of ``hooks.generate`` for ``samples[i]``: its engine, its address. It
    returns a sample for each, in their order; tokens with loss must come from that sample's own requests.
    """

    async def __call__(self, args: Any, samples: list[Any], sampling_params: dict[str, Any], /) -> Sequence[Any]: ...


class RewardsHook(Protocol):
    """``hooks.rewards``: advantages [N] of ``batch.all_rows``, from their rewards; equal on every rank (T11)."""

    def __call__(self, batch: Any, /) -> Sequence[float]: ...


class SamplesHook(Protocol):
    """``hooks.samples``: which of ``batch.all_rows`` bear no loss, by number; equal on every rank (T10)."""

    def __call__(self, batch: Any, /) -> Iterable[int]: ...


class RolloutLogHook(Protocol):
    """``hooks.rollout_log``: called after a trained step with its row of ``steps.jsonl``; true skips the trackers."""

    def __call__(self, step: int, row: dict[str, Any], batch: Any, /) -> bool | None: ...


class EvalLogHook(Protocol):
    """``hooks.eval_log``: called after an evaluation with its rows of ``eval.jsonl``, one for each dataset."""

    def __call__(self, version: int, rows: list[dict[str, Any]], /) -> None: ...


class PostprocessHook(Protocol):
    """``hooks.postprocess``: gets this rank's samples (``penstock.consumers.grpo.train_rows.TrainRow``), with log
    π_old.

    It may clear ``loss_mask`` and set ``advantages`` [L] of each row (T8, T10).
    """

    def __call__(self, batch: Any, rows: list[Any], /) -> None: ...


class ConvertHook(Protocol):
    """``hooks.convert``: key -> an entry for each of ``batch.all_rows``, for a slime-shaped trainer.

    ``rewards`` (trained on), ``raw_reward`` and ``truncated`` are numbers; ``loss_masks`` [R] of each response
    may remove loss from tokens (T8); any other key is added to the train data: numbers, or arrays of floats.
    """

    def __call__(self, batch: Any, /) -> Mapping[str, Sequence[Any]]: ...


class AllSamplesHook(Protocol):
    """``hooks.all_samples``: called with finished samples, by their rows of the history; repeated after a kill."""

    def __call__(self, rows: list[Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Form:
    """One accepted signature of a function."""

    #: Names of its arguments.
    parameters: tuple[str, ...]
    #: Names of optional arguments, passed if it has such parameters.
    optional: tuple[str, ...] = ()
    #: slime's form: ``args``, and samples with slime's attributes.
    is_slime: bool = False
    #: Whether the first parameter must have this name, which distinguishes it from other forms.
    has_name: bool = False
    #: True: it must be async; False: it must not; None: either.
    is_async: bool | None = None

    def takes(self, function: Callable[..., Any]) -> bool:
        """Return whether ``function`` has this signature; true if Python does not know."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return True
        if self.has_name and next(iter(signature.parameters), "") != self.parameters[0]:
            return False
        named = {name: None for name in self.optional if name in signature.parameters}
        try:
            signature.bind(*self.parameters, **named)
        except TypeError:
            return False
        return True

    def __str__(self) -> str:
        return f"({', '.join(self.parameters)})"


#: Key of section ``hooks`` -> accepted forms of its function.
FORMS: dict[str, tuple[Form, ...]] = {
    "generate": (Form(("args", "sample", "sampling_params"), ("evaluation",), is_slime=True, is_async=True),),
    "eval": (Form(("args", "sample", "sampling_params"), ("evaluation",), is_slime=True, is_async=True),),
    "rollout": (Form(("args", "samples", "sampling_params"), ("evaluation",), is_slime=True, is_async=True),),
    "sample": (Form(("sample",)), Form(("args", "sample"), ("rollout_id", "evaluation"), is_slime=True)),
    "rewards": (Form(("batch",), is_async=False), Form(("args", "samples"), is_slime=True, is_async=False)),
    "samples": (Form(("batch",), is_async=False), Form(("args", "groups"), is_slime=True, is_async=False)),
    "rollout_log": (
        Form(("step", "row", "batch"), is_async=False),
        Form(("rollout_id", "args", "samples", "extra_metrics", "seconds"), is_slime=True, is_async=False),
    ),
    "eval_log": (Form(("version", "rows"), is_async=False),),
    "postprocess": (
        Form(("batch", "rows"), is_async=False),
        Form(("args", "rollout_id", "rollout_data"), is_slime=True, is_async=False),
    ),
    "convert": (Form(("batch",), is_async=False), Form(("args", "samples"), is_slime=True, is_async=False)),
    "all_samples": (
        Form(("rows",), is_async=False),
        Form(("args", "all_samples", "data_source"), is_slime=True, is_async=False),
    ),
}


_REWARD = (Form(("sample",), ("judges",)), Form(("args", "sample"), is_slime=True, has_name=True))
_FILTER = (Form(("group",), is_async=False),)
#: Likewise for functions that other sections name, by the end of their keys.
_ELSEWHERE: dict[str, tuple[Form, ...]] = {
    "reward.function": _REWARD,
    "reward.parts": _REWARD,
    "worker.rewards": _REWARD,
    "reward.group": (
        Form(("samples",), ("judges",)),
        Form(("args", "samples"), is_slime=True, has_name=True),
    ),
    "trainer.filter.functions": _FILTER,
    "buffer.filters": _FILTER,
}


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of the user's."""

    #: Its name in errors: key and import path.
    name: str
    function: Callable[..., Any]
    form: Form

    def named(self, **values: Any) -> dict[str, Any]:
        """Return those of ``values`` that the function has parameters for."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return {}
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return values
        return {name: value for name, value in values.items() if name in parameters}


def load_hook(key: str, path: str) -> Hook:
    """Import and check the function that ``hooks.KEY`` names.

    Raises:
        ConfigError: it cannot be imported, is not a function, or has other parameters than this hook.
    """
    what = f"hooks.{key}"
    return Hook(f"{what} {path}", *_checked(what, path, find(path, what), FORMS[key]))


def check_hook(what: str, path: str, found: object) -> None:
    """Raise ConfigError if ``found`` is invalid for the configuration key ``what``, which names it as ``path``."""
    section, _, key = what.partition(".")
    end = what.rpartition(".")[2]
    if section == "hooks":
        _checked(what, path, found, FORMS[key])
    elif what in _ELSEWHERE or (section, end) == ("data", "reward"):
        _checked(what, path, found, _ELSEWHERE.get(what, _REWARD))
    elif what == "worker.environments" or (section, end) == ("data", "environment"):
        if missing := [name for name in ("reset", "step") if not callable(getattr(found, name, None))]:
            raise ConfigError(f"{what} {path} has no {missing[0]}: it needs async reset and async step, in a class.")
    elif what == "trainer.transport" and not (isinstance(found, type) and callable(getattr(found, "send", None))):
        raise ConfigError(f"{what} {path} is not a sender: derive its class from penstock.Sender.")


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether its result has to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _checked(what: str, path: str, found: object, forms: tuple[Form, ...]) -> tuple[Callable[..., Any], Form]:
    if not callable(found):
        raise ConfigError(f"{what} {path} is not a function.")
    for form in forms:
        if form.takes(found):
            if form.is_async and not is_async(found):
                raise ConfigError(f"{what} {path} is awaited but is not async: write it as async def.")
            if form.is_async is False and is_async(found):
                raise ConfigError(f"{what} {path} is called without await but is async: write it as def.")
            return found, form
    called = " or ".join(f"{path.rpartition(':')[2]}{form}" for form in forms)
    raise ConfigError(
        f"{what} {path} has the signature {inspect.signature(found)} but is called as {called}: change its parameters."
    )
