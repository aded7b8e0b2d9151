"""Continue a sample in a new environment: restore its snapshot, or replay the recorded turns.

    restore(job, state)   the environment is as it was after its last recorded observation
    reset, step, step...  every step answers as recorded (``replayable``)

A step whose answer was not recorded may have had effects. It is repeated only if the environment allows it.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from penstock.errors import EnvironmentRaised, EnvironmentTimeout, ProtocolError
from penstock.records.codec import pack, unpack
from penstock.records.sample import FinishReason, Sample
from penstock.records.worker_causes import CodeCalled, EnvironmentCall
from penstock.text import format_exc, safe_repr
from penstock.workers.jobs.environments import Environment, Observation, checked, step, within

log = logging.getLogger(__name__)

#: Largest packed snapshot, in bytes.
MAX_STATE_BYTES = 1024 * 1024


def can_resume(environment: Environment | None) -> bool:
    """Return whether a new environment of this class can continue a sample of several turns."""
    return is_replayable(environment) or has_snapshots(environment)


def is_replayable(environment: Environment | None) -> bool:
    """Return whether an environment repeats its observations for the same turns, so that steps may be replayed."""
    return bool(getattr(environment, "replayable", False))


def has_snapshots(environment: Environment | None) -> bool:
    """Return whether an environment defines ``snapshot`` and ``restore``."""
    return all(callable(getattr(environment, name, None)) for name in ("snapshot", "restore"))


def packed_state(sample: Sample, state: bytes = b"") -> bytes | None:
    """Pack the reward that an environment set and its packed snapshot; return None if they cannot be stored."""
    reward: Any = sample.reward
    if hasattr(reward, "item"):
        reward = reward.item()  # numpy's and torch's
    try:
        data = pack([reward, sample.reward_info, state])
        unpack(data, "a state")
    except (TypeError, ValueError, OverflowError, ProtocolError):
        return None
    return data


def unpacked_state(data: bytes) -> tuple[Any, dict[str, Any], bytes]:
    """Return the reward, its fields and the packed snapshot. Raises ProtocolError."""
    found = unpack(data, "the state of an environment")
    if not isinstance(found, list) or [type(one) for one in found[1:]] != [dict, bytes]:
        raise ProtocolError(f"the stored state of an environment is invalid: {safe_repr(found)}.")
    return found[0], found[1], found[2]


async def snapshot(environment: Environment, sample: Sample, timeout_s: float, call: CodeCalled) -> bytes | None:
    """Return the packed state after an observation; None if snapshots are not supported or cannot be stored.

    Waits like ``within``.

    Raises:
        EnvironmentTimeout, EnvironmentRaised: see ``within``; or the snapshot itself cannot be stored.
    """
    if not has_snapshots(environment):
        return None
    state = await within(timeout_s, environment.snapshot, call)  # type: ignore[attr-defined]
    try:
        data = pack(state)
        unpack(data, "it")
    except (TypeError, ValueError, OverflowError, ProtocolError) as exc:
        raise EnvironmentRaised(
            f"{call.label} returned a state that cannot be stored ({format_exc(exc)}): return numbers, text, bytes, "
            "lists, and maps whose keys are text."
        ) from exc
    if len(data) > MAX_STATE_BYTES:
        raise EnvironmentRaised(
            f"{call.label} returned a state of {len(data)} bytes; at most {MAX_STATE_BYTES} are stored."
        )
    return packed_state(sample, data)


async def reset(
    environment: Environment, sample: Sample, timeout_s: float, call_of: Callable[[EnvironmentCall], CodeCalled]
) -> Observation | None:
    """Call ``reset`` before the first turn; return the new prompt, None to keep the job's. Raises like ``step``."""
    given, call = sample.job.copy_for_user(), call_of("reset")
    prompt = checked(await within(timeout_s, lambda: environment.reset(given), call), call.label)
    return None if prompt is None or prompt.done else prompt


async def resume(
    environment: Environment,
    sample: Sample,
    encode: Callable[[Observation], list[int]],
    timeout_s: float,
    call_of: Callable[[EnvironmentCall], CodeCalled],
) -> bool:
    """Bring a new environment to the current state of a sample. Waits for user code.

    Args:
        encode: returns the tokens of an observation.

    Returns:
        False if that is impossible: the sample has to start over.

    Raises:
        EnvironmentTimeout, EnvironmentRaised: ``reset`` failed.
    """
    may_repeat = is_replayable(environment) or bool(getattr(environment, "repeatable", False))
    is_open_step = sample.finish_reason == FinishReason.STOP and len(sample.turns) == sample.num_turns
    if is_open_step and has_snapshots(environment) and not may_repeat:
        log.info("sample %s starts over: the step after its turn %d may have had effects", sample.id, sample.num_turns)
        return False
    if sample.num_turns == 1 and sample.state is None:
        prompt = await reset(environment, sample, timeout_s, call_of)
        return prompt is None or encode(prompt) == sample.tokens[: sample.prompt_length]
    try:
        if has_snapshots(environment) and sample.state is not None:
            sample.reward, sample.reward_info, data = unpacked_state(sample.state)
            given, state = sample.job.copy_for_user(), unpack(data, "the snapshot of an environment")
            await within(timeout_s, lambda: environment.restore(given, state), call_of("restore"))  # type: ignore[attr-defined]
            return True
        return is_replayable(environment) and await _replay(environment, sample, encode, timeout_s, call_of)
    except (EnvironmentRaised, EnvironmentTimeout) as exc:
        log.warning("sample %s starts over: %s", sample.id, exc)
        return False


async def _replay(
    environment: Environment,
    sample: Sample,
    encode: Callable[[Observation], list[int]],
    timeout_s: float,
    call_of: Callable[[EnvironmentCall], CodeCalled],
) -> bool:
    """Repeat the recorded steps; return whether each returned the recorded observation."""
    ends = list(_turns(sample))
    if len(ends) != sample.num_turns - 1:
        log.warning("sample %s starts over: a turn without tokens cannot be repeated", sample.id)
        return False
    prompt = await reset(environment, sample, timeout_s, call_of)
    if prompt is not None and encode(prompt) != sample.tokens[: sample.prompt_length]:
        log.warning("sample %s starts over: the environment did not repeat its prompt", sample.id)
        return False
    past = replace(sample, reward=None, reward_info={}, sides={}, loss_mask=[])
    for turn, (end, until) in enumerate(ends, 1):
        past = _until(sample, end, turn, past)
        observation = await step(environment, past, timeout_s, call_of("step"))
        is_same = observation is not None and not observation.done
        if not is_same or encode(observation) != sample.tokens[end:until]:  # type: ignore[arg-type]
            log.warning(
                "sample %s starts over: the environment did not repeat its observation after turn %d; "
                "do not set replayable on it",
                sample.id,
                turn,
            )
            return False
    sample.reward, sample.reward_info, sample.sides = past.reward, past.reward_info, past.sides
    return True


def _turns(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield (end of the turn, end of its observation) as token indices, for each turn with a recorded observation."""
    at = sample.prompt_length
    runs = [(bool(generated), len(list(run))) for generated, run in groupby(sample.generated[at:])]
    for (generated, count), (_, observed) in zip(runs[::2], runs[1::2], strict=False):
        if not generated:
            return
        yield at + count, at + count + observed
        at += count + observed


def _until(sample: Sample, end: int, turns: int, past: Sample) -> Sample:
    """Return a sample truncated to the end of a turn, with the fields that the environment set in ``past``."""
    lists = {name: getattr(sample, name)[:end] for name in ("tokens", "logprobs", "generated", "versions")}
    lists["loss_mask"] = past.loss_mask + lists["generated"][len(past.loss_mask) :]
    done = sample.turns[:turns]
    return replace(past, turns=done, text="".join(done), num_turns=turns, finish_reason=FinishReason.STOP, **lists)
