"""``hooks.sample``: functions of the user's that are asked with each drawn sample before its reward."""

from dataclasses import replace
from typing import Any

from penstock.config import Config
from penstock.errors import HookError
from penstock.hooks.signatures import Hook, load_hooks
from penstock.hooks.slime import args_of, seen
from penstock.names import Lane
from penstock.protocol.records.job import JobFailure
from penstock.protocol.records.sample import Sample
from penstock.words import shown
from workers.hooks.calls import called
from workers.rewards.outcomes import number_of

#: What stays as it was drawn.
_DRAWN = ("tokens", "logprobs", "generated", "versions", "prompt_length")
#: What a hook is given copies of.
_LISTS = ("tokens", "logprobs", "generated", "versions", "loss_mask", "turns", "sides", "reward_info")


class SampleHooks:
    """The hooks of one worker.

    Raises:
        ConfigError: one cannot be imported, or cannot be called as it is.
    """

    def __init__(self, config: Config) -> None:
        self._hooks = load_hooks("sample", config.hooks.sample)
        self._limit_s = config.hooks.timeout_s
        self._args = args_of(config)
        self._key = config.reward.key

    async def apply(self, sample: Sample) -> None:
        """Ask all of them, in order. Waits for at most ``hooks.timeout_s`` each.

        A reward that one of them sets is the sample's.

        Raises:
            HookError: one raised or hung, or changed what was drawn.
            RewardError: a reward that was set is no number.
        """
        for hook in self._hooks:
            await self._apply(hook, sample, f"sample {sample.id}: {hook.name}")

    async def _apply(self, hook: Hook, sample: Sample, what: str) -> None:
        # A copy: what is kept of a sample whose hook fails, or still runs, must be what was drawn.
        given = replace(sample, **{name: _copy(getattr(sample, name)) for name in _LISTS})
        if hook.form.is_slime:
            await self._ask_slime(hook, given, what)
        else:
            await called(lambda: hook.function(given), self._limit_s, what)
        if changed := [name for name in _DRAWN if getattr(given, name) != getattr(sample, name)]:
            raise HookError(
                JobFailure.HOOK_UNPROVEN,
                f"{what} changed {', '.join(changed)} of what was drawn: it may take loss off tokens, no more.",
            )
        mask = _checked_mask(given.loss_mask, sample.loss_mask, what)
        if given.reward is not None:
            reward, info = number_of(given.reward, sample.id, hook.name, self._key)
            sample.reward, sample.reward_info = reward, given.reward_info | info
        sample.loss_mask, sample.sides, sample.seen = mask, given.sides, given.seen

    async def _ask_slime(self, hook: Hook, sample: Sample, what: str) -> None:
        made, at = seen(sample), sample.prompt_length
        tokens, length = list(made.tokens), made.response_length
        named = hook.named(rollout_id=None, evaluation=sample.job.lane == Lane.EVAL)
        answer = await called(lambda: hook.function(self._args, made, **named), self._limit_s, what)
        if answer is not None and not isinstance(answer, type(made)):
            raise HookError(JobFailure.HOOK_RAISED, f"{what} gave {shown(answer)}, which is neither a sample nor None.")
        made = sample.seen = made if answer is None else answer
        if made.tokens != tokens or made.response_length != length:
            raise HookError(JobFailure.HOOK_UNPROVEN, f"{what} changed tokens that were drawn.")
        given = [0] * length if made.remove_sample else made.loss_mask
        if given is not None:
            sample.loss_mask = [*sample.loss_mask[:at], *given]
        sample.reward = made.reward


def _checked_mask(mask: Any, before: list[int], what: str) -> list[int]:
    if not isinstance(mask, list) or len(mask) != len(before) or any(new not in (0, 1) for new in mask):
        raise HookError(
            JobFailure.HOOK_UNPROVEN, f"{what} made a loss_mask that has no 0 or 1 for each of {len(before)} tokens."
        )
    if any(new and not old for new, old in zip(mask, before, strict=True)):
        raise HookError(JobFailure.HOOK_UNPROVEN, f"{what} put loss on tokens that had none.")
    return [int(new) for new in mask]


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value
