"""Translate the sampling parameters of verl's agent loops, and detect whether a prompt is trained on.

    PenstockAgentLoopWorker ─lane─> sampling_params with LANE ─agent loop─> PenstockServer.generate ─> lane_of

verl does not tell its agent loops whether a prompt is for validation, and validation may use the same parameters. Its
worker knows (verl_manager.py), and adds the lane to the sampling parameters, which every loop forwards.
"""

import functools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.config.sampling import GREEDY_BELOW, NEUTRAL, check_sampling, hidden_by, temperature_of
from penstock.consumers.adapters.rows import plain
from penstock.consumers.batch import behaviour
from penstock.errors import ConfigError
from penstock.text import format_exc

log = logging.getLogger(__name__)

#: Pattern of a name part made by ``uuid``.
_HEX = "[0-9a-f]" * 32


def new_file(folder: Path, name: str) -> Path:
    """Return an unused path in ``folder`` for weights of the subscription ``name``."""
    return folder / f"verl-{name}-{uuid.uuid4().hex}.safetensors"


def remove_left(folder: Path, name: str) -> None:
    """Remove leftover files of subscription ``name``, which the caller must own.

    Files that cannot be removed are logged and kept.
    """
    for left in folder.glob(f"verl-{name}-{_HEX}.safetensors"):
        try:
            left.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("weights that a killed process left cannot be removed: %s", format_exc(exc))


#: Key of the lane in verl's sampling parameters.
LANE = "penstock_lane"
#: vLLM's parameter, as used by verl -> SGLang's.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
#: Parameter that does not affect sampling -> values that request no additional output.
_SILENT: dict[str, tuple[Any, ...]] = {
    "logprobs": (False, True),  # logprobs of the sampled token are always returned
    "prompt_logprobs": (False,),
    "detokenize": (False, True),
    "do_sample": (True,),
    "n": (1,),
}


def told(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap ``AgentLoopWorker._run_agent_loop`` to add the lane of a prompt to its sampling parameters."""

    @functools.wraps(run)
    async def with_lane(
        worker: Any, sampling_params: Mapping[str, Any], trajectory: Mapping[str, Any], **given: Any
    ) -> Any:
        # ReMax baselines: verl samples them greedily during training and uses only their rewards.
        baseline = _is_greedy(sampling_params) and not _is_greedy({"temperature": worker.rollout_config.temperature})
        lane = "eval" if trajectory["validate"] or baseline else "train"
        return await run(worker, {**sampling_params, LANE: lane}, trajectory, **given)

    return with_lane


def lane_of(sampling_params: Mapping[str, Any]) -> str:
    """Return ``train`` or ``eval``. Raises ConfigError if the lane is missing."""
    lane = sampling_params.get(LANE)
    if lane not in ("train", "eval"):
        raise ConfigError(
            f"Whether a prompt is for training or validation is not said, for its sampling_params have no {LANE}: set "
            "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=penstock.consumers.adapters.verl_manager."
            "PenstockAgentLoopManager, and have agent loops pass on what they are given."
        )
    return str(lane)


def sampling_of(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Translate verl's sampling parameters to SGLang's names; omit those without effect.

    Raises ConfigError for unknown parameters and invalid values.
    """
    sampling: dict[str, Any] = {"temperature": temperature_of(sampling_params)}
    for called, given in sampling_params.items():
        name, value = _NAMES.get(called, called), plain(given, called)
        if called in ("temperature", LANE) or value is None or value in ([], {}, "") or _changes_nothing(called, value):
            continue
        if name in sampling and sampling[name] != value:
            raise ConfigError(f"An agent loop asks verl's server for {name} twice, {sampling[name]!r} and {value!r}.")
        sampling[name] = [value] if name in ("stop", "stop_token_ids") and not isinstance(value, list) else value
    for name in ("n", "beam_width"):
        if sampling.get(name, 1) != 1:
            raise ConfigError(f"An agent loop asks verl's server for {name} {sampling[name]!r}: a call has one answer.")
    try:
        check_sampling(sampling)
    except ValueError as exc:
        raise ConfigError(f"An agent loop asks verl's server for what penstock cannot draw by: {exc}.") from None
    return sampling


def check_trained(sampling: Mapping[str, Any], temperature: float) -> None:
    """Raise ConfigError if samples to train on would have another distribution than verl assumes.

    Args:
        temperature: ``actor_rollout_ref.rollout.temperature``, by which verl divides logits (T6).
    """
    if not behaviour.same(sampling["temperature"], temperature):
        raise ConfigError(
            f"An agent loop asks for temperature {sampling['temperature']:g} in training, and verl divides by "
            f"actor_rollout_ref.rollout.temperature, {temperature:g}: ask for the latter."
        )
    if (hidden := hidden_by(sampling)) is not None:
        name, value = hidden
        raise ConfigError(
            f"{name} {value!r} draws from another distribution than the one that verl trains on: leave it out of "
            "actor_rollout_ref.rollout, or of what the agent loop asks for in training; validation may have it."
        )


def _is_greedy(sampling: Mapping[str, Any]) -> bool:
    return temperature_of(sampling) < GREEDY_BELOW


def _changes_nothing(name: str, value: Any) -> bool:
    """Return whether a parameter has its neutral value; 0 is vLLM's unlimited ``top_k``."""
    if name in _SILENT:
        return value in _SILENT[name]
    neutral = (NEUTRAL.get(_NAMES.get(name, name)), 0 if name == "top_k" else None)
    return not isinstance(value, (list, dict)) and value in neutral
