"""Generate samples with a user function that calls the worker's engine, one at a time or a group at once.

args, sample(s), sampling_params ─> function ─> returned samples ─> proofs.py ─> samples, verified token by token
                                       └─> args.engine.generate, or /generate at its address ─> recorded_engine.py
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
from penstock.workers.hooks.open_calls import called
from penstock.workers.hooks.proofs import settle
from penstock.workers.hooks.recorded_engine import RecordedEngine, Slot
from penstock.workers.jobs.generate import Source
from penstock.workers.jobs.routed_experts import check_rows
from penstock.workers.jobs.sampling import sampling_for

log = logging.getLogger(__name__)

#: Largest request in bytes.
MAX_BYTES = 16 * 1024 * 1024
HOST = "127.0.0.1"


@asynccontextmanager
async def engine_endpoint(draws: RecordedEngine) -> AsyncIterator[int]:
    """Serve one sample's ``/generate`` requests in SGLang's form inside the ``async with``; yield the port.

    slime's functions post to ``http://{args.sglang_router_ip}:{args.sglang_router_port}/generate``. Each sample has its
    own loopback port, so that all tokens generated through it belong to the sample.
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


async def _answer(draws: RecordedEngine, body: Any) -> dict[str, Any]:
    """Answer a request. Raises ConfigError unless it requests one complete answer."""
    if not isinstance(body, dict):
        raise ConfigError("a request must be a map with input_ids or text.")
    if body.get("stream") or isinstance(body.get("rid"), list):
        raise ConfigError("streams and batches are not supported: omit stream, and send one prompt per request.")
    prompt, sampling = body.get("input_ids", body.get("text")), body.get("sampling_params") or {}
    if not isinstance(prompt, (list, str)) or not isinstance(sampling, dict):
        raise ConfigError("send input_ids (a list of token ids) or text, and sampling_params as a map.")
    if set(body) - {"input_ids", "text", "sampling_params", "return_logprob", "rid", "stream"}:
        extra = sorted(set(body) - {"input_ids", "text", "sampling_params", "return_logprob", "rid", "stream"})
        raise ConfigError(f"unsupported in a custom generate function: {', '.join(map(str, extra))[:200]}.")
    return await draws.generate(prompt, sampling)


#: slime's module with the HTTP client that its functions use.
_SLIME_HTTP = "slime.utils.http_utils"
#: Key of section ``hooks`` whose function generates a complete group.
GROUP = "rollout"


@dataclass(frozen=True, slots=True)
class _InProgress:
    """Hold the state of a sample in progress."""

    sample: Sample
    account: Drawn
    #: Sample object passed to the function.
    given: Any
    #: Recording engine of the sample.
    draws: RecordedEngine
    #: Arguments with the sample's engine and address.
    args: Namespace


class GenerateHook:
    """Generate samples with the user function of one key of section ``hooks``.

    Args:
        key: generate, eval or rollout.

    Raises:
        ConfigError: the function cannot be imported, or has an unsupported signature.
    """

    def __init__(self, key: str, path: str, config: Config) -> None:
        self._hook = load_hook(key, path)
        #: Whether the function generates a complete group at once.
        self.of_groups = key == GROUP
        self._config = config
        self._args = args_of(config)
        self._is_ready = False

    async def make(
        self, source: Source, samples: Sequence[Sample], accounts: Sequence[Drawn], slot: Slot = nullcontext
    ) -> None:
        """Generate ``samples`` of one job from the start, discarding tokens of earlier attempts.

        Args:
            accounts: token usage of each sample, updated in place.
            slot: returns a context manager that holds a slot during a request.

        Raises:
            ConfigError: the job names an environment.
            HookError: the function raised, timed out (``hooks.generate_timeout_s``), or returned tokens not generated.
            EngineDied, EngineError: see ``Engine.generate``.
        """
        job = samples[0].job
        if job.environment is not None:
            raise ConfigError(f"job {job.id} has an environment, but {self._hook.name} generates samples: remove one.")
        if job.images:
            raise ConfigError(
                f"job {job.id} has images, but {self._hook.name} generates samples from tokens alone: remove the hook "
                "or the images."
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
    async def _begun(self, source: Source, sample: Sample, account: Drawn, slot: Slot) -> AsyncIterator[_InProgress]:
        account.lost_turn += sum(sample.generated)
        _reset(sample)
        draws = RecordedEngine(source, sample, account, slot)
        try:
            async with engine_endpoint(draws) as port:
                at = {"sglang_router_ip": HOST, "sglang_router_port": port, "engine": draws}
                given = begun(sample, _prompt(sample.job, source.tokenizer))
                yield _InProgress(sample, account, given, draws, Namespace(**vars(self._args) | at))
        finally:
            await draws.close()

    async def _call(self, begun: Sequence[_InProgress]) -> list[Any]:
        """Call the function; return its results by sample."""
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

    async def _or_engine_error(self, begun: Sequence[_InProgress], call: Any) -> Any:
        """Return the result of ``call``, or raise the engine's error if the engine is lost first."""
        task, lost = asyncio.ensure_future(call), [one.draws.lost for one in begun]
        try:
            await asyncio.wait({task, *lost}, return_when=asyncio.FIRST_COMPLETED)
            for one in lost:
                if one.done():
                    raise one.result()
            return await task
        finally:
            task.cancel()

    def _take(self, one: _InProgress, made: Any, engine: Engine) -> None:
        """Verify the result for one sample (a sample or a list of samples) and copy it into the sample."""
        sample, rollout = one.sample, self._config.rollout
        context = min(rollout.max_context_tokens, engine.info.max_context)
        what = f"sample {sample.id}: {self._hook.name}"
        if isinstance(made, list) and engine.returns_routing:
            raise HookError(
                JobFailure.HOOK_RAISED,
                f"{what} returned {len(made)} samples, but rollout.sides has routed_experts, which need a single "
                "sequence: return one sample.",
            )
        settle(sample, as_list(made), one.draws.made, max_context=context, what=what)
        sample.seen, sample.reward, sample.drawn_s = made, reward_of(made), time.time()
        # Tokens are counted as discarded when generated: correct the count for verified ones.
        one.account.lost_turn -= sum(sample.generated)
        if engine.returns_routing:
            check_rows(sample)

    def _open_slime_client(self, args: Namespace) -> None:
        """Open the HTTP client of slime's functions like slime's manager."""
        if self._is_ready:
            return
        self._is_ready = True
        if (open_client := getattr(sys.modules.get(_SLIME_HTTP), "init_http_client", None)) is not None:
            open_client(args)


class GenerateHooks:
    """Select the user function that generates the samples of a job, if configured.

    Raises:
        ConfigError: a function cannot be imported, or has an unsupported signature.
    """

    def __init__(self, config: Config) -> None:
        hooks = config.hooks
        paths = {"generate": hooks.generate, GROUP: hooks.rollout, "eval": hooks.eval}
        makers = {key: GenerateHook(key, path, config) for key, path in paths.items() if path is not None}
        self._train = makers.get("generate") or makers.get(GROUP)
        self._eval = makers.get("eval") or self._train

    def of(self, job: Job) -> GenerateHook | None:
        """Return the generate function for ``job``; None if the engine generates its turns directly."""
        return self._eval if job.lane == Lane.EVAL else self._train


def _checked(answers: Any, begun: Sequence[_InProgress], what: str) -> list[Any]:
    """Return the results as a list; raise HookError unless there is one result per requested sample."""
    if not isinstance(answers, (list, tuple)) or len(answers) != len(begun):
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} returned {safe_repr(answers)} instead of a list of {len(begun)} samples: return one per input "
            "sample, in the same order.",
        )
    made = []
    for answer, one in zip(answers, begun, strict=True):
        several = as_list(answer)
        if not 0 < len(several) <= MAX_PARTS:
            raise HookError(
                JobFailure.HOOK_RAISED,
                f"{what} returned {len(several)} samples for one: return 1 to {MAX_PARTS}.",
            )
        for part in several:
            if not isinstance(part, type(one.given)):
                raise HookError(
                    JobFailure.HOOK_RAISED,
                    f"{what} returned {safe_repr(part)}: return the input sample, or copies of it.",
                )
        made.append(several if len(several) > 1 else several[0])
    every = [id(part) for answer in made for part in as_list(answer)]
    if len(set(every)) < len(every):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} returned a sample twice: return one per input, in order.")
    return made


def _prompt(job: Job, tokenizer: Tokenizer) -> str:
    return job.prompt if job.prompt is not None else tokenizer.decode(list(job.prompt_ids or ()))


def _reset(sample: Sample) -> None:
    for values in (sample.tokens, sample.logprobs, sample.generated, sample.loss_mask, sample.versions, sample.turns):
        values.clear()
    sample.text, sample.finish_reason, sample.num_turns, sample.num_unproven = "", "", 1, 0
    sample.sides.clear()
    sample.seen = None
