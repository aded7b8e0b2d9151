"""The server that verl's agent loops ask for tokens: a Ray actor that submits their prompts to a run's workers.

    generate (many at once) ─> calls ─> one thread: submit, poll, publish ─> a future each

That thread alone uses Redis.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from safetensors.torch import load_file
from verl.workers.rollout.replica import TokenOutput

from penstock.consumers.adapters import rows
from penstock.consumers.adapters.asking import Answer, Asking
from penstock.consumers.adapters.inside_verl.sampling import check_trained, lane_of, remove_left, sampling_of
from penstock.consumers.adapters.prompts import Request
from penstock.errors import ConfigError, PenstockError
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from penstock.redis.saved_config import config_of

#: Longest wait for an answer before new calls are accepted, in seconds.
LOOK_S = 0.05
#: Keys of ``rollout.engine_kwargs.penstock`` and their defaults.
SETTINGS: dict[str, Any] = {"config": None, "run": None, "name": "verl", "reward_info": ()}


def settings_of(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``actor_rollout_ref.rollout.engine_kwargs.penstock``, with defaults. Raises ConfigError."""
    given = dict(engine_kwargs.get("penstock") or {})
    if unknown := sorted(given.keys() - SETTINGS.keys()):
        raise ConfigError(f"rollout.engine_kwargs.penstock has no {unknown[0]!r}: it takes {', '.join(SETTINGS)}.")
    if (given.get("config") is None) == (given.get("run") is None):
        raise ConfigError(
            "Name the run: +actor_rollout_ref.rollout.engine_kwargs.penstock.run=NAME, or .config=/path/to/run.yaml."
        )
    return SETTINGS | given


class PenstockServer:
    """An inference server for verl (a Ray actor).

    Args:
        settings: as of :func:`settings_of`.
        prompt_length, response_length: verl's limits; the latter is also the most new tokens.
        temperature: ``actor_rollout_ref.rollout.temperature``, by which verl divides the logits.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, prompt_length: int, response_length: int, temperature: float
    ) -> None:
        self._limits = (prompt_length, response_length)
        self._temperature = temperature
        #: Entries of ``reward_info`` that verl gets of each answer; it takes the same ones of all.
        self._reward_info = tuple(settings["reward_info"])
        config = config_of(settings["config"], settings["run"], "rollout.name=penstock")
        self._lanes = {
            "train": Asking(config, name=settings["name"]),
            "eval": Asking(config, name=f"{settings['name']}-validation", lane="eval"),
        }
        #: Version -> verl's step.
        self._steps: dict[int, int] = {}
        self._waiting: dict[str, Future[Any]] = {}
        #: Calls for which Redis had no room: lane and request.
        self._no_room: deque[tuple[Future[Any], str, Request]] = deque()
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        self._joined: Future[None] = Future()
        threading.Thread(target=self._serve, name="penstock", daemon=True).start()

    async def where(self, rank: int) -> str:
        """Return a name for a replica, once the server holds its subscription. It is not an HTTP address."""
        await asyncio.wrap_future(self._joined)
        return f"penstock-{rank}"

    async def weights_dir(self) -> str:
        """Return the folder of the run's weights, shared by actor and server; create it if it is missing."""
        folder = self._lanes["train"].weights_dir.absolute()
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        return str(folder)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str = "",
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        label: Any = None,
        metadata: Mapping[str, Any] | None = None,
        takes_mask: bool = False,
        **others: object,
    ) -> TokenOutput:
        """Return one answer, once it is complete. The run's reward gets ``label`` and ``metadata``.

        Args:
            sampling_params: vLLM's names or SGLang's, with the lane that the plugin puts there
                (inside_verl/sampling.py).
            takes_mask: the caller reads ``penstock_mask``.

        ``extra_fields``: ``penstock_reward``, ``penstock_reward_info`` (the entries that the settings name; None if the
        reward gave none), ``penstock_turns``, ``penstock_mask`` (0 on observations), verl's steps of the oldest and
        newest weights of its tokens, and, if the run has a teacher or a reference policy, their log-probabilities,
        ``penstock_teacher_logprobs`` and ``penstock_reference_logprobs``, an entry per token. ``stop_reason`` is
        "aborted" for calls that verl cancelled.

        Raises:
            ConfigError: the prompt holds more than text, or is too long; a sampling parameter is unknown or unsuitable
                for training (T6, T7); the answer was sampled at another temperature than requested; the run has an
                environment, whose tokens this caller would train on.
            ProtocolError: the prompt is dead-lettered, with the reason.
        """
        if image_data or video_data or audio_data:
            raise ConfigError("The prompt holds images, video or audio: rollout.name=penstock carries text alone.")
        if unknown := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"An agent loop asks verl's server for {unknown[0]}, which penstock's does not know.")
        longest, most = self._limits
        ids = [int(token) for token in prompt_ids]
        if not ids or len(ids) > longest + most - 1:
            raise ConfigError(f"The prompt has {len(ids)} tokens; it needs at least 1 and room for a response.")
        lane, sampling = lane_of(sampling_params), sampling_of(sampling_params)
        if lane == "train":
            check_trained(sampling, self._temperature)
        sampling["max_new_tokens"] = min(sampling.get("max_new_tokens", most), longest + most - len(ids))
        said = rows.label(label)
        request = Request(prompt_ids=ids, metadata=dict(metadata or {}), sampling=sampling, **said)
        answer = await self._call(self._submit, lane, request)
        output = self._output(answer)
        if not takes_mask and not all(output.extra_fields.get("penstock_mask", ())):
            raise ConfigError(
                "The answer holds tokens that bear no loss, and this agent loop trains on all: set "
                "actor_rollout_ref.rollout.agent.default_agent_loop=penstock."
            )
        return output

    async def update_weights(self, file: str, step: int) -> int:
        """Publish a file of tensors (safetensors) as verl's ``step``; return the version. Later calls use it (T12)."""
        return int(await self._call(self._publish, file, step))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Cancel all calls without an answer: their ``generate`` returns as aborted."""
        await self._call(self._abort)

    async def resume_generation(self) -> None:
        """Do nothing: calls are accepted at any time."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = resume_generation

    async def start_profile(self, **_: object) -> None:
        """Do nothing: the engines are penstock's."""

    stop_profile = start_profile

    async def _call(self, of: Callable[..., None], *given: Any) -> Any:
        future: Future[Any] = Future()
        self._calls.put((of, given, future))
        if self._broken is not None and not future.done():
            raise self._broken
        return await asyncio.wrap_future(future)

    def _output(self, answer: Answer | None) -> TokenOutput:
        if answer is None:
            nothing = {"penstock_reward_info": dict.fromkeys(self._reward_info)}
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=nothing)
        [row] = answer.rows
        record = answer.records[row.row.k]
        fields: dict[str, Any] = {
            "global_steps": self._steps.get(row.row.newest),
            "min_global_steps": self._steps.get(row.row.oldest),
            "max_global_steps": self._steps.get(row.row.newest),
            "penstock_reward": row.row.reward,
            "penstock_mask": row.response("loss_mask").astype(int).tolist(),
            "penstock_turns": record.num_turns,
            "penstock_reward_info": {name: record.reward_info.get(name) for name in self._reward_info},
        }
        for name in (TEACHER_LOGPROBS, REFERENCE_LOGPROBS):
            if getattr(row, name) is not None:
                fields[f"penstock_{name}"] = row.response(name).tolist()
        return TokenOutput(
            token_ids=row.response("tokens").tolist(),
            log_probs=row.response("logprobs").tolist(),
            stop_reason="length" if row.row.status == "truncated" else "completed",
            extra_fields=fields,
        )

    # Methods of the thread.

    def _serve(self) -> None:
        try:
            with ExitStack() as places:
                for lane in self._lanes.values():
                    places.enter_context(lane)
                train = self._lanes["train"]
                remove_left(train.weights_dir, train.name)
                self._joined.set_result(None)
                while True:
                    self._take()
                    self._submit_again()
                    for lane in self._lanes.values():
                        for answer in lane.poll(LOOK_S):
                            self._hand_out(answer)
        except BaseException as exc:
            self._break(exc)

    def _take(self) -> None:
        """Execute queued calls; wait for one if no request is live."""
        idle = not self._num_live and not self._no_room
        while idle or not self._calls.empty():
            of, given, future = self._calls.get()
            idle = False
            if not future.set_running_or_notify_cancel():
                continue  # the caller is gone; a running future cannot be cancelled
            try:
                of(future, *given)
            except PenstockError as exc:
                future.set_exception(exc)
            except BaseException as exc:
                future.set_exception(exc)
                raise

    def _submit(self, future: Future[Any], lane: str, request: Request) -> None:
        job = self._lanes[lane].submit_now(request)
        if job is None:
            self._no_room.append((future, lane, request))
        else:
            self._waiting[job] = future

    @property
    def _num_live(self) -> int:
        return sum(lane.num_live for lane in self._lanes.values())

    def _submit_again(self) -> None:
        """Submit the calls for which Redis had no room, oldest first; answers read meanwhile make room."""
        while self._no_room:
            future, lane, request = self._no_room.popleft()
            num = len(self._no_room)
            try:
                self._submit(future, lane, request)
            except PenstockError as exc:
                future.set_exception(exc)
            if len(self._no_room) > num:
                self._no_room.rotate(1)
                if not self._num_live:
                    time.sleep(LOOK_S)
                return

    def _publish(self, future: Future[Any], file: str, step: int) -> None:
        version = self._lanes["train"].publish(load_file(file), step=step)
        self._steps[version] = step
        future.set_result(version)

    def _abort(self, future: Future[Any]) -> None:
        for lane in self._lanes.values():
            for job in lane.abort() if lane.num_live else []:
                self._hand_out(None, job)
        while self._no_room:
            self._no_room.popleft()[0].set_result(None)
        future.set_result(None)

    def _hand_out(self, answer: Answer | None, job: str = "") -> None:
        future = self._waiting.pop(job if answer is None else answer.job)
        if answer is not None and answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer)

    def _break(self, exc: BaseException) -> None:
        """Stop serving; fail every pending call with ``exc``."""
        self._broken = exc
        waiting = [*self._waiting.values(), *(one[0] for one in self._no_room)]
        while not self._calls.empty():
            waiting.append(self._calls.get()[2])
        for future in [self._joined, *waiting]:
            if not future.done():
                future.set_exception(exc)
