"""Call the user functions of ``hooks.sample`` with each generated sample before its reward."""

from itertools import pairwise
from typing import Any

from penstock.config import Config
from penstock.errors import HookError
from penstock.hooks.signatures import Hook, load_hook
from penstock.hooks.slime import PartRewards, args_of, as_list, reward_of, seen
from penstock.names import Lane
from penstock.records.job import JobFailure
from penstock.records.sample import Sample
from penstock.records.worker_causes import CodeCalled
from penstock.text import safe_repr
from penstock.workers.hooks.open_calls import called
from penstock.workers.hooks.read_back import field_of, read_mask, read_seen
from penstock.workers.rewards.outcomes import number_of

#: Fields that hooks must not change.
_FIXED = ("tokens", "logprobs", "generated", "versions", "prompt_length")


class SampleHooks:
    """Call the sample hooks of one worker.

    Raises:
        ConfigError: a hook cannot be imported, or has an unsupported signature.
    """

    def __init__(self, config: Config) -> None:
        self._hooks = [load_hook("sample", path) for path in config.hooks.sample]
        self._limit_s = config.hooks.timeout_s
        self._args = args_of(config)
        self._key = config.reward.key

    async def apply(self, sample: Sample) -> None:
        """Call all hooks in order. Waits at most ``hooks.timeout_s`` for each.

        A reward set by a hook becomes the sample's reward.

        Raises:
            HookError: a hook raised, timed out, or changed generated tokens.
            RewardError: a hook set a reward that is not a number.
        """
        for hook in self._hooks:
            await self._apply(hook, sample, CodeCalled("hook", hook.name, "sample", sample.id))

    async def _apply(self, hook: Hook, sample: Sample, call: CodeCalled) -> None:
        what = call.label
        # Pass a copy: if the hook fails or keeps running, the sample must not change.
        given = sample.copy_for_user()
        if hook.form.is_slime:
            await self._call_slime(hook, given, call)
        else:
            await called(lambda: hook.function(given), self._limit_s, call)
        if changed := [name for name in _FIXED if field_of(given, name) != getattr(sample, name)]:
            raise HookError(
                JobFailure.HOOK_UNPROVEN,
                f"{what} changed {', '.join(changed)} of the generated sample: only remove loss from tokens.",
            )
        try:
            mask = read_mask(field_of(given, "loss_mask"), sample.loss_mask)
        except ValueError as exc:
            raise HookError(JobFailure.HOOK_UNPROVEN, f"{what} {exc}") from exc
        set_ = field_of(given, "reward")
        if isinstance(set_, PartRewards):
            sample.reward = set_  # type: ignore[assignment]  # converted when the reward is computed
        elif set_ is not None:
            reward, info = number_of(set_, sample.id, hook.name, self._key)
            sample.reward, sample.reward_info = reward, _map_of(given, "reward_info", what) | info
        sample.sides = _map_of(given, "sides", what)
        sample.loss_mask = mask
        read_seen(given, sample)

    async def _call_slime(self, hook: Hook, sample: Sample, call: CodeCalled) -> None:
        """Call a slime-style hook with the sample, or with each sample that the generate function returned."""
        made = seen(sample)
        starts = [0, *sample.parts] if isinstance(made, list) else [0]
        answers: list[Any] = []
        masks: list[int] = []
        for one, (start, end) in zip(as_list(made), pairwise([*starts, len(sample.tokens)]), strict=True):
            answer = await self._call_one(hook, sample, one, call)
            given = [0] * answer.response_length if answer.remove_sample else answer.loss_mask
            at = end - answer.response_length
            masks += sample.loss_mask[start:end] if given is None else [*sample.loss_mask[start:at], *given]
            answers.append(answer)
        sample.seen = answers if isinstance(made, list) else answers[0]
        sample.loss_mask = masks
        sample.reward = reward_of(sample.seen)

    async def _call_one(self, hook: Hook, sample: Sample, made: Any, call: CodeCalled) -> Any:
        tokens, length = list(made.tokens), made.response_length
        named = hook.named(rollout_id=None, evaluation=sample.job.lane == Lane.EVAL)
        answer = await called(lambda: hook.function(self._args, made, **named), self._limit_s, call)
        if answer is not None and not isinstance(answer, type(made)):
            raise HookError(
                JobFailure.HOOK_RAISED, f"{call.label} returned {safe_repr(answer)}: return a sample or None."
            )
        made = made if answer is None else answer
        if made.tokens != tokens or made.response_length != length:
            raise HookError(JobFailure.HOOK_UNPROVEN, f"{call.label} changed generated tokens.")
        return made


def _map_of(given: Sample, name: str, what: str) -> dict[str, Any]:
    value = field_of(given, name)
    if not isinstance(value, dict):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} set {name} to {safe_repr(value)}: set a map.")
    return value
