"""``hooks.generate``: a function of the user's makes each sample, by asking the worker's own engine.

args, sample, sampling_params ─> function ─> what it made ─> claim.py ─> the sample, proven token by token
                                    └─> args.engine.generate, or /generate at args' address ─> draws.py
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError, HookError
from penstock.hooks.signatures import Hook, load_hook
from penstock.hooks.slime import args_of, begun
from penstock.names import Lane
from penstock.protocol.records.drawn import Drawn
from penstock.protocol.records.job import Job, JobFailure
from penstock.protocol.records.sample import Sample
from penstock.weights.tokenizer import Tokenizer
from penstock.words import shown
from workers.engine import Engine, Segment
from workers.hooks.calls import called
from workers.hooks.claim import settle
from workers.hooks.door import HOST, door
from workers.hooks.draws import Draws
from workers.jobs.environments import Environment
from workers.jobs.generate import generate_sample, mask_offpolicy
from workers.jobs.routed_experts import check_rows
from workers.jobs.sampling import sampling_for
from workers.jobs.valves import Valves

#: Where slime keeps the client that its functions ask with.
_THEIR_HTTP = "slime.utils.http_utils"


class Generating:
    """How one worker makes samples: by the function of ``hooks.generate``, or by turns of the engine.

    Raises:
        ConfigError: the function cannot be imported, or cannot be called as it is.
    """

    def __init__(self, config: Config) -> None:
        path = config.hooks.generate
        self._hook = load_hook("generate", path) if path is not None else None
        self._config = config
        self._args = args_of(config)
        self._is_ready = False

    async def make(
        self,
        engine: Engine,
        valves: Valves,
        sample: Sample,
        *,
        tokenizer: Tokenizer,
        environment: Environment | None = None,
        interval: int = 0,
        drawn: Callable[[], None] | None = None,
        account: Drawn | None = None,
        answered: Callable[[Segment], None] | None = None,
    ) -> None:
        """Make ``sample``; arguments, waits and errors are those of ``generate_sample``.

        A custom function begins anew where an earlier try left tokens.

        Raises:
            HookError: the function raised, hung (``hooks.generate_timeout_s``), or claims what was not drawn.
        """
        job, account, rollout = sample.job, account or Drawn(), self._config.rollout
        if self._hook is None:
            await generate_sample(
                engine, valves, job, sample.k, tokenizer=tokenizer, rollout=rollout, environment=environment,
                partial=sample, interval=interval, drawn=drawn, account=account, answered=answered,
            )  # fmt: skip
            return
        if environment is not None:
            raise ConfigError(
                f"job {job.id} names an environment, and hooks.generate makes samples: remove one of them."
            )
        account.lost_turn += sum(sample.generated)
        _empty(sample)
        async with valves.sample():
            draws = Draws(engine, valves, job, sample.k, tokenizer=tokenizer, rollout=rollout, account=account,
                          answered=answered)  # fmt: skip
            try:
                async with door(draws) as port:
                    made = await self._ask(self._hook, sample, draws, self._args_at(port, draws))
            finally:
                await draws.close()
        what = f"sample {sample.id}: {self._hook.name}"
        context = min(rollout.max_context_tokens, engine.info.max_context)
        settle(sample, made, draws.made, max_context=context, what=what)
        sample.seen, sample.reward, sample.drawn_s = made, made.reward, time.time()
        # It is the sample's now, and was counted as thrown away while it was drawn.
        account.lost_turn -= sum(sample.generated)
        if rollout.mask_offpolicy_in_partial_rollout:
            mask_offpolicy(sample)
        if engine.tells_routing:
            check_rows(sample)

    async def _ask(self, hook: Hook, sample: Sample, draws: Draws, args: Namespace) -> Any:
        job, what = sample.job, f"sample {sample.id}: {hook.name}"
        made = begun(sample, _prompt(job, draws.tokenizer))
        sampling = sampling_for(job, self._config.rollout) | {
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        sample.started_s = time.time()
        named = hook.named(evaluation=job.lane == Lane.EVAL)
        self._ready_slime(args)

        async def work() -> Any:
            return await hook.function(args, made, sampling, **named)

        limit_s = self._config.hooks.generate_timeout_s
        asking = asyncio.ensure_future(called(work, limit_s, what))
        try:
            await asyncio.wait({asking, draws.lost}, return_when=asyncio.FIRST_COMPLETED)
            if draws.lost.done():
                raise draws.lost.result()
            answer = await asking
        finally:
            asking.cancel()
        if not isinstance(answer, type(made)):
            raise HookError(
                JobFailure.HOOK_RAISED, f"{what} gave {shown(answer)}, which is no sample: return the one it was given."
            )
        return answer

    def _args_at(self, port: int, draws: Draws) -> Namespace:
        return Namespace(**vars(self._args) | {"sglang_router_ip": HOST, "sglang_router_port": port, "engine": draws})

    def _ready_slime(self, args: Namespace) -> None:
        """slime's functions ask with a client that its own manager opens before."""
        if self._is_ready:
            return
        self._is_ready = True
        if (open_client := getattr(sys.modules.get(_THEIR_HTTP), "init_http_client", None)) is not None:
            open_client(args)


def _prompt(job: Job, tokenizer: Tokenizer) -> str:
    return job.prompt if job.prompt is not None else tokenizer.decode(list(job.prompt_ids or ()))


def _empty(sample: Sample) -> None:
    for values in (sample.tokens, sample.logprobs, sample.generated, sample.loss_mask, sample.versions, sample.turns):
        values.clear()
    sample.text, sample.finish_reason, sample.num_turns, sample.num_unproven = "", "", 1, 0
    sample.sides.clear()
    sample.seen = None
