"""Generate samples with a user function that calls the worker's own engine: one sample each, or a group together.

args, sample(s), sampling_params ─> function ─> its samples ─> proofs.py ─> each sample, verified token by token
                                       └─> engine.generate of a sample's args, or /generate at its address ─> draws.py
"""

import asyncio
import logging
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from penstock.config import Config
from penstock.errors import ConfigError, EngineError, HookError
from penstock.hooks.signatures import load_hook
from penstock.hooks.slime import args_of, as_list, begun, reward_of
from penstock.model.tokenizer import Tokenizer
from penstock.names import Lane
from penstock.records.codec import copy_plain
from penstock.records.job import Job, JobFailure
from penstock.records.sample import MAX_PARTS, Drawn, Sample
from penstock.records.worker_causes import CodeCalled
from penstock.system.connections import BAD_REQUESTS
from penstock.text import safe_repr
from penstock.workers.engine import Engine
from penstock.workers.hooks.draws import Draws, Slot
from penstock.workers.hooks.open_calls import called
from penstock.workers.hooks.proofs import settle
from penstock.workers.jobs.generate import Source
from penstock.workers.jobs.routed_experts import check_rows
from penstock.workers.jobs.sampling import sampling_for

log = logging.getLogger(__name__)

#: Largest request in bytes.
MAX_BYTES = 16 * 1024 * 1024
HOST = "127.0.0.1"


@asynccontextmanager
async def door(draws: Draws) -> AsyncIterator[int]:
    """Serve one sample's requests, in the form of SGLang's ``/generate``, inside the ``async with``; yield the port.

    slime's functions send requests to ``http://{args.sglang_router_ip}:{args.sglang_router_port}/generate``. Each
    sample has its own loopback address, so that all tokens generated there belong to it.
    """
    app = web.Application(client_max_size=MAX_BYTES)

    async def generate(request: web.Request) -> web.Response:
        try:
            return web.json_response(await _answer(draws, await request.json()))
        except (ConfigError, ValueError, RecursionError) as exc:
            return web.json_response({"error": {"message": str(exc)}}, status=400)
        except EngineError as exc:
            return web.json_response({"error": {"message": str(exc)}}, status=503)

    app.add_routes([web.post("/generate", generate)])
    runner = web.AppRunner(app, access_log=None, logger=BAD_REQUESTS, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _answer(draws: Draws, body: Any) -> dict[str, Any]:
    """Answer a request. Raises ConfigError if it does not ask for one answer."""
    if not isinstance(body, dict):
        raise ConfigError("a request is a map with input_ids or text.")
    if body.get("stream") or isinstance(body.get("rid"), list):
        raise ConfigError("answers are complete and single: leave stream out, and ask for one prompt at a time.")
    asked, sampling = body.get("input_ids", body.get("text")), body.get("sampling_params") or {}
    if not isinstance(asked, (list, str)) or not isinstance(sampling, dict):
        raise ConfigError("give input_ids, a list of token ids, or text, and sampling_params as a map.")
    if set(body) - {"input_ids", "text", "sampling_params", "return_logprob", "rid", "stream"}:
        extra = sorted(set(body) - {"input_ids", "text", "sampling_params", "return_logprob", "rid", "stream"})
        raise ConfigError(f"a custom generate function cannot ask for {', '.join(map(str, extra))[:200]}.")
    return await draws.generate(asked, sampling)


#: slime's module with the HTTP client of its functions.
_SLIME_HTTP = "slime.utils.http_utils"
#: The key of section ``hooks`` whose function generates a whole group.
GROUP = "rollout"


@dataclass(frozen=True, slots=True)
class _Begun:
    """A sample in progress."""

    sample: Sample
    account: Drawn
    #: The object passed to the function.
    given: Any
    #: Engine handle of the sample.
    draws: Draws
    #: With the sample's own engine and address.
    args: Namespace


class Maker:
    """The user function of one key of section ``hooks``.

    Args:
        key: generate, eval or rollout.

    Raises:
        ConfigError: the function cannot be imported, or has an unsupported signature.
    """

    def __init__(self, key: str, path: str, config: Config) -> None:
        self._hook = load_hook(key, path)
        #: Whether it generates the samples of a group together.
        self.of_groups = key == GROUP
        self._config = config
        self._args = args_of(config)
        self._is_ready = False

    async def make(
        self, source: Source, samples: Sequence[Sample], accounts: Sequence[Drawn], slot: Slot = nullcontext
    ) -> None:
        """Generate ``samples``, of one job, which start over: tokens of an earlier attempt are discarded.

        Args:
            accounts: token usage of each sample, updated.
            slot: held around each request.

        Raises:
            ConfigError: the job names an environment.
            HookError: the function raised, hung (``hooks.generate_timeout_s``), or claims tokens not generated.
            EngineDied, EngineError: as ``Engine.generate``.
        """
        job = samples[0].job
        if job.environment is not None:
            raise ConfigError(f"job {job.id} names an environment, and {self._hook.name} makes samples: remove one.")
        if job.images:
            raise ConfigError(
                f"job {job.id} has images, and {self._hook.name}, which makes samples, asks the engine with tokens "
                "alone: remove the hook, or the images."
            )
        async with source.valves.sample(), AsyncExitStack() as stack:
            begun = [
                await stack.enter_async_context(self._begun(source, sample, account, slot))
                for sample, account in zip(samples, accounts, strict=True)
            ]
            made = await self._call(begun)
        for one, answer in zip(begun, made, strict=True):
            self._take(one, answer, source.engine)

    @asynccontextmanager
    async def _begun(self, source: Source, sample: Sample, account: Drawn, slot: Slot) -> AsyncIterator[_Begun]:
        account.lost_turn += sum(sample.generated)
        _reset(sample)
        draws = Draws(source, sample, account, slot)
        try:
            async with door(draws) as port:
                at = {"sglang_router_ip": HOST, "sglang_router_port": port, "engine": draws}
                given = begun(sample, _prompt(sample.job, source.tokenizer))
                yield _Begun(sample, account, given, draws, Namespace(**vars(self._args) | at))
        finally:
            await draws.close()

    async def _call(self, begun: Sequence[_Begun]) -> list[Any]:
        """Call the function; return its result for each sample."""
        job, hook = begun[0].sample.job, self._hook
        sampling = copy_plain(sampling_for(job, self._config.rollout)) | {
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        named = hook.named(evaluation=job.lane == Lane.EVAL)
        args: Namespace = begun[0].args
        given: Any = begun[0].given
        call = CodeCalled("hook", hook.name, "sample", begun[0].sample.id)
        if self.of_groups:
            args = Namespace(**vars(self._args), each=[one.args for one in begun])
            given = [one.given for one in begun]
            call = CodeCalled("hook", hook.name, "group", job.id)
        for one in begun:
            one.sample.started_s = time.time()
        self._open_slime_client(begun[0].args)

        async def work() -> Any:
            return await hook.function(args, given, sampling, **named)

        answer = await self._or_engine_error(begun, called(work, self._config.hooks.generate_timeout_s, call))
        return _checked(answer if self.of_groups else [answer], begun, call.label)

    async def _or_engine_error(self, begun: Sequence[_Begun], asking: Any) -> Any:
        """Return the result of ``asking``; raise the engine's error if the engine is lost first."""
        task, lost = asyncio.ensure_future(asking), [one.draws.lost for one in begun]
        try:
            await asyncio.wait({task, *lost}, return_when=asyncio.FIRST_COMPLETED)
            for one in lost:
                if one.done():
                    raise one.result()
            return await task
        finally:
            task.cancel()

    def _take(self, one: _Begun, made: Any, engine: Engine) -> None:
        """Verify the result of one sample, a sample or a list of them, and copy it into the sample."""
        sample, rollout = one.sample, self._config.rollout
        context = min(rollout.max_context_tokens, engine.info.max_context)
        what = f"sample {sample.id}: {self._hook.name}"
        if isinstance(made, list) and engine.returns_routing:
            raise HookError(
                JobFailure.HOOK_RAISED,
                f"{what} gave {len(made)} samples, and routed_experts of rollout.sides belong to one sequence: return "
                "a single sample.",
            )
        settle(sample, as_list(made), one.draws.made, max_context=context, what=what)
        sample.seen, sample.reward, sample.drawn_s = made, reward_of(made), time.time()
        # These tokens were counted as discarded when they were generated.
        one.account.lost_turn -= sum(sample.generated)
        if engine.returns_routing:
            check_rows(sample)

    def _open_slime_client(self, args: Namespace) -> None:
        """Open the HTTP client of slime's functions, as its own manager would."""
        if self._is_ready:
            return
        self._is_ready = True
        if (open_client := getattr(sys.modules.get(_SLIME_HTTP), "init_http_client", None)) is not None:
            open_client(args)


class Makers:
    """The user functions that make the samples of a run, instead of the engine's turns.

    Raises:
        ConfigError: a function cannot be imported, or has an unsupported signature.
    """

    def __init__(self, config: Config) -> None:
        hooks = config.hooks
        paths = {"generate": hooks.generate, GROUP: hooks.rollout, "eval": hooks.eval}
        makers = {key: Maker(key, path, config) for key, path in paths.items() if path is not None}
        self._train = makers.get("generate") or makers.get(GROUP)
        self._eval = makers.get("eval") or self._train

    def of(self, job: Job) -> Maker | None:
        """Return the function that makes the samples of ``job``; None: the engine's turns do."""
        return self._eval if job.lane == Lane.EVAL else self._train


def _checked(answers: Any, begun: Sequence[_Begun], what: str) -> list[Any]:
    """Return the results as a list; raise HookError unless there is one sample for each that was requested."""
    if not isinstance(answers, (list, tuple)) or len(answers) != len(begun):
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} gave {safe_repr(answers)} instead of a list of {len(begun)} samples: return one for each that "
            "it was given, in their order.",
        )
    made = []
    for answer, one in zip(answers, begun, strict=True):
        several = as_list(answer)
        if not 0 < len(several) <= MAX_PARTS:
            raise HookError(
                JobFailure.HOOK_RAISED,
                f"{what} gave {len(several)} samples for one: return at least one, and at most {MAX_PARTS}.",
            )
        for part in several:
            if not isinstance(part, type(one.given)):
                raise HookError(
                    JobFailure.HOOK_RAISED,
                    f"{what} gave {safe_repr(part)}, which is no sample: return what it was given, or copies of it.",
                )
        made.append(several if len(several) > 1 else several[0])
    every = [id(part) for answer in made for part in as_list(answer)]
    if len(set(every)) < len(every):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} gave one sample twice: return one for each, in their order.")
    return made


def _prompt(job: Job, tokenizer: Tokenizer) -> str:
    return job.prompt if job.prompt is not None else tokenizer.decode(list(job.prompt_ids or ()))


def _reset(sample: Sample) -> None:
    for values in (sample.tokens, sample.logprobs, sample.generated, sample.loss_mask, sample.versions, sample.turns):
        values.clear()
    sample.text, sample.finish_reason, sample.num_turns, sample.num_unproven = "", "", 1, 0
    sample.sides.clear()
    sample.seen = None
