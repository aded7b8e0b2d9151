"""Generate samples with a user function that calls the worker's own engine: one sample each, or a group together.

args, sample(s), sampling_params ─> function ─> its samples ─> maker.py ─> each sample, verified token by token
                                       └─> engine.generate of a sample's args, or /generate at its address ─> draws.py
"""

import asyncio
import logging
import math
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from penstock.config import Config
from penstock.errors import ConfigError, EngineError, HookError
from penstock.hooks.signatures import load_hook
from penstock.hooks.slime import args_of, begun
from penstock.model.tokenizer import Tokenizer
from penstock.names import ROUTED_EXPERTS, Lane
from penstock.records.causes import CodeCalled
from penstock.records.codec import copy_plain
from penstock.records.job import Job, JobFailure
from penstock.records.sample import Drawn, FinishReason, Sample, SampleStatus
from penstock.text import safe_repr, utf8_safe
from penstock.weights.serving import BAD_REQUESTS
from penstock.workers.engine import Engine, Segment
from penstock.workers.hooks.draws import Draw, Draws
from penstock.workers.hooks.open_calls import called
from penstock.workers.jobs.routed_experts import check_rows, keep_rows
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.valves import Valves

log = logging.getLogger(__name__)

#: Largest difference between a claimed logprob and the engine's.
CLOSE = 1e-4


def settle(sample: Sample, made: Any, draws: Sequence[Draw], *, max_context: int, what: str) -> None:
    """Fill ``sample`` with what ``made``, a slime sample of a custom generate function, claims and ``draws`` prove.

    A token counts as generated if one of the sample's own requests generated it after exactly the tokens before it. It
    gets the logprob and version of that request, regardless of the claim. Loss on any other token is refused (T6, T8).

    Raises:
        HookError: hook_unproven if loss is claimed on tokens not generated; hook_raised if it is no finished sample.
    """
    tokens, length = _sequence(made, max_context, what)
    at = len(tokens) - length
    proofs = _proofs(tokens, draws)
    mask = _mask(made, length, what)
    claimed = _logprobs(made, length, what)
    for i in range(length):
        proof = proofs[at + i]
        if mask[i]:
            _check(proof, claimed[i] if claimed is not None else None, f"{what}: token {i} of its response")
    own = [proof if i >= at and proof is not None and not proof[0].unfit else None for i, proof in enumerate(proofs)]
    sample.tokens, sample.prompt_length = tokens, at
    sample.logprobs = [0.0 if proof is None else proof[0].sample.logprobs[proof[1]] for proof in own]
    sample.versions = [-1 if proof is None else proof[0].sample.versions[proof[1]] for proof in own]
    sample.generated = [int(proof is not None) for proof in own]
    sample.loss_mask = [0] * at + mask
    used = list({id(proof[0]): proof[0] for proof in own if proof is not None}.values())
    _describe(sample, made, used)


def _sequence(made: Any, max_context: int, what: str) -> tuple[list[int], int]:
    """[P + R] Return its tokens, and R."""
    status = getattr(getattr(made, "status", None), "value", None)
    if status not in (SampleStatus.PENDING, SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} did not finish its sample: its status is {safe_repr(status)}.")
    # Before anything is assigned: a failure must leave the sample unchanged.
    if not isinstance(made.response, str):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} gave a response that is not text.")
    tokens, length = made.tokens, made.response_length
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} gave tokens that are not a list of token ids.")
    if type(length) is not int or not 0 < length < len(tokens):
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} gave {len(tokens)} tokens with response_length {safe_repr(length)}: a sample needs a prompt and a "
            "response.",
        )
    if len(tokens) > max_context:
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} gave {len(tokens)} tokens, and rollout.max_context_tokens and the engine allow {max_context}.",
        )
    return list(tokens), length


def _proofs(tokens: list[int], draws: Sequence[Draw]) -> list[tuple[Draw, int] | None]:
    """Return for each token the request that generated it and its index there; the longest match goes first."""
    found: list[tuple[Draw, int] | None] = [None] * len(tokens)
    matches = []
    for draw in draws:
        begin = draw.sample.prompt_length
        if tokens[:begin] == draw.input_ids:
            pairs = zip(tokens[begin:], draw.output_ids, strict=False)
            end = begin + next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens) - begin, len(draw.output_ids))
            )
            matches.append((bool(draw.unfit), begin - end, begin, end, draw))
    for _, _, begin, end, draw in sorted(matches, key=lambda one: one[:2]):
        for i in range(begin, end):
            found[i] = found[i] or (draw, i)
    return found


def _mask(made: Any, length: int, what: str) -> list[int]:
    mask = [1] * length if made.loss_mask is None else made.loss_mask
    if not isinstance(mask, list) or len(mask) != length or any(one not in (0, 1) for one in mask):
        raise HookError(
            JobFailure.HOOK_UNPROVEN, f"{what} gave a loss_mask that has no 0 or 1 for each of {length} tokens."
        )
    return [0] * length if getattr(made, "remove_sample", False) else [int(one) for one in mask]


def _logprobs(made: Any, length: int, what: str) -> list[Any] | None:
    claimed = made.rollout_log_probs
    if claimed is None:
        return None
    if not isinstance(claimed, list) or len(claimed) != length:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} gave rollout_log_probs that are not a list with one for each of {length} tokens.",
        )
    return claimed


def _check(proof: tuple[Draw, int] | None, claimed: Any, what: str) -> None:
    if proof is None:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} bears loss, and no request of this sample generated it after the tokens before it: send the "
            "tokens unchanged, and set loss_mask 0 on tokens that the engine did not generate.",
        )
    draw, index = proof
    if draw.unfit:
        raise HookError(JobFailure.HOOK_UNPROVEN, f"{what} bears loss, and {draw.unfit}.")
    drawn = draw.sample.logprobs[index]
    close = isinstance(claimed, (int, float)) and math.isclose(claimed, drawn, rel_tol=0.0, abs_tol=CLOSE)
    if claimed is not None and not close:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} claims log-probability {safe_repr(claimed)}, but was sampled with {drawn}.",
        )


def _describe(sample: Sample, made: Any, used: Sequence[Draw]) -> None:
    """Set text, turns, times and counts."""
    inner = [draw.sample for draw in used]
    is_cut = made.status.value == SampleStatus.TRUNCATED
    if made.status.value == SampleStatus.PENDING:
        is_cut = bool(inner) and inner[-1].finish_reason == FinishReason.LENGTH
    sample.status = SampleStatus.TRUNCATED if is_cut else SampleStatus.COMPLETED
    sample.finish_reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    sample.turns = [one.text for one in inner]
    sample.text = utf8_safe(made.response) or "".join(sample.turns)
    sample.num_turns = max(1, len(inner))
    sample.num_aborts = sum(one.num_aborts for one in inner)
    sample.cached_tokens = sum(one.cached_tokens for one in inner)
    sample.generate_s = sum(one.generate_s for one in inner)
    sample.num_unproven = min(sum(sample.generated), sum(one.num_unproven for one in inner))
    if any(ROUTED_EXPERTS in one.sides for one in inner):
        for one in sorted(inner, key=lambda one: len(one.tokens)):
            keep_rows(sample, one.sides.get(ROUTED_EXPERTS))


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

Slot = Callable[[], AbstractAsyncContextManager[object]]


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
        self,
        engine: Engine,
        valves: Valves,
        samples: Sequence[Sample],
        *,
        tokenizer: Tokenizer,
        accounts: Sequence[Drawn],
        answered: Callable[[Segment, bool], None] | None = None,
        slot: Slot = nullcontext,
    ) -> None:
        """Generate ``samples``, of one job. Tokens of an earlier attempt are discarded.

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
        async with valves.sample(), AsyncExitStack() as stack:
            begun = [
                await stack.enter_async_context(self._begun(engine, valves, sample, account, tokenizer, answered, slot))
                for sample, account in zip(samples, accounts, strict=True)
            ]
            made = await self._call(begun)
        for one, answer in zip(begun, made, strict=True):
            self._take(one, answer, engine)

    @asynccontextmanager
    async def _begun(
        self,
        engine: Engine,
        valves: Valves,
        sample: Sample,
        account: Drawn,
        tokenizer: Tokenizer,
        answered: Callable[[Segment, bool], None] | None,
        slot: Slot,
    ) -> AsyncIterator[_Begun]:
        account.lost_turn += sum(sample.generated)
        _reset(sample)
        draws = Draws(engine, valves, sample.job, sample.k, tokenizer=tokenizer, rollout=self._config.rollout,
                      account=account, answered=answered, slot=slot)  # fmt: skip
        try:
            async with door(draws) as port:
                at = {"sglang_router_ip": HOST, "sglang_router_port": port, "engine": draws}
                given = begun(sample, _prompt(sample.job, tokenizer))
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
        """Verify the result of one sample and copy it into the sample."""
        sample, rollout = one.sample, self._config.rollout
        context = min(rollout.max_context_tokens, engine.info.max_context)
        settle(sample, made, one.draws.made, max_context=context, what=f"sample {sample.id}: {self._hook.name}")
        sample.seen, sample.reward, sample.drawn_s = made, made.reward, time.time()
        # These tokens were counted as discarded when they were generated.
        one.account.lost_turn -= sum(sample.generated)
        if rollout.mask_offpolicy_in_partial_rollout:
            sample.mask_offpolicy()
        if engine.tells_routing:
            check_rows(sample)

    def _open_slime_client(self, args: Namespace) -> None:
        """Open the HTTP client of slime's functions, as its own manager would."""
        if self._is_ready:
            return
        self._is_ready = True
        if (open_client := getattr(sys.modules.get(_SLIME_HTTP), "init_http_client", None)) is not None:
            open_client(args)


def _checked(answers: Any, begun: Sequence[_Begun], what: str) -> list[Any]:
    """Return the results as a list; raise HookError unless there is one sample for each that was requested."""
    if not isinstance(answers, (list, tuple)) or len(answers) != len(begun):
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} gave {safe_repr(answers)} instead of a list of {len(begun)} samples: return one for each that "
            "it was given, in their order.",
        )
    for answer, one in zip(answers, begun, strict=True):
        if not isinstance(answer, type(one.given)):
            raise HookError(
                JobFailure.HOOK_RAISED,
                f"{what} gave {safe_repr(answer)}, which is no sample: return what it was given.",
            )
    if len({id(answer) for answer in answers}) < len(answers):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} gave one sample twice: return one for each, in their order.")
    return list(answers)


def _prompt(job: Job, tokenizer: Tokenizer) -> str:
    return job.prompt if job.prompt is not None else tokenizer.decode(list(job.prompt_ids or ()))


def _reset(sample: Sample) -> None:
    for values in (sample.tokens, sample.logprobs, sample.generated, sample.loss_mask, sample.versions, sample.turns):
        values.clear()
    sample.text, sample.finish_reason, sample.num_turns, sample.num_unproven = "", "", 1, 0
    sample.sides.clear()
    sample.seen = None
