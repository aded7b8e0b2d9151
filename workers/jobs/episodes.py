"""Continue a sample in a new environment: by its snapshot, else by replay of the recorded turns.

    restore(job, state)   the environment is as it was after its last recorded observation
    reset, step, step...  every step answers as recorded (``replayable``)

A step whose answer was not recorded may have acted. It is repeated only by an environment that allows it.
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

#: Most bytes of a snapshot, packed.
MAX_STATE_BYTES = 1024 * 1024


def can_resume(environment: Environment | None) -> bool:
    """Return whether a sample of several turns can be continued in a new environment of this class."""
    return is_replayable(environment) or has_snapshots(environment)


def is_replayable(environment: Environment | None) -> bool:
    """Return whether an environment gives the same observations to the same turns, and its steps may be repeated."""
    return bool(getattr(environment, "replayable", False))


def has_snapshots(environment: Environment | None) -> bool:
    """Return whether an environment has ``snapshot`` and ``restore``."""
    return all(callable(getattr(environment, name, None)) for name in ("snapshot", "restore"))


def packed_state(sample: Sample, state: bytes = b"") -> bytes | None:
    """Pack what an environment set, and its packed snapshot; None if that cannot be stored."""
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
    """Return reward, its fields and the packed snapshot. Raises ProtocolError."""
    found = unpack(data, "the state of an environment")
    if not isinstance(found, list) or [type(one) for one in found[1:]] != [dict, bytes]:
        raise ProtocolError(f"the state of an environment is {safe_repr(found)}.")
    return found[0], found[1], found[2]


async def snapshot(environment: Environment, sample: Sample, timeout_s: float, call: CodeCalled) -> bytes | None:
    """Return the packed state after an observation; None without snapshots, or if the reward cannot be stored.

    Waits as ``within``.

    Raises:
        EnvironmentTimeout, EnvironmentRaised: as ``within``, or the snapshot cannot be stored.
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
    """Prepare an environment for the first turn; return the prompt, None: the job's. Waits and raises as ``step``."""
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
    """Bring a new environment to where a sample is. Waits for the user's code.

    Args:
        encode: returns the tokens of an observation.

    Returns:
        False: that is not possible, and the sample has to start over.

    Raises:
        EnvironmentTimeout, EnvironmentRaised: it cannot prepare for the first turn.
    """
    may_repeat = is_replayable(environment) or bool(getattr(environment, "repeatable", False))
    is_open_step = sample.finish_reason == FinishReason.STOP and len(sample.turns) == sample.num_turns
    if is_open_step and has_snapshots(environment) and not may_repeat:
        log.info("sample %s starts over: the step after its turn %d may have acted", sample.id, sample.num_turns)
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
    """Repeat the recorded steps; return whether each gave the recorded observation."""
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
                "replayable is for environments that do",
                sample.id,
                turn,
            )
            return False
    sample.reward, sample.reward_info, sample.sides = past.reward, past.reward_info, past.sides
    return True


def _turns(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield for each turn with a recorded observation the index after its tokens, and that after its observation."""
    at = sample.prompt_length
    runs = [(bool(drawn), len(list(run))) for drawn, run in groupby(sample.generated[at:])]
    for (drawn, count), (_, observed) in zip(runs[::2], runs[1::2], strict=False):
        if not drawn:
            return
        yield at + count, at + count + observed
        at += count + observed


def _until(sample: Sample, end: int, turns: int, past: Sample) -> Sample:
    """Return a sample as it was at the end of a turn, with what the environment set in ``past``, the turn before."""
    lists = {name: getattr(sample, name)[:end] for name in ("tokens", "logprobs", "generated", "versions")}
    lists["loss_mask"] = past.loss_mask + lists["generated"][len(past.loss_mask) :]
    done = sample.turns[:turns]
    return replace(past, turns=done, text="".join(done), num_turns=turns, finish_reason=FinishReason.STOP, **lists)
