"""An engine that draws by the law (law.py), as a process: ``python -m tests.chaos.parts.law_engine --port P``.

Answers as SGLang does, weights and all: a load reads the files that the trainer wrote, and what it draws from then on
follows from what stands in them. Requests run side by side, ``--pace`` tokens a second each, and go on over a change of
weights in place. Notes what it loaded in the history, before it says so.
"""

import argparse
import asyncio
import json
import os
import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors import safe_open

from tests.chaos.parts import law
from tests.chaos.parts.drawn import DrawnCount
from tests.chaos.recording import contents
from tests.chaos.recording.recorder import Recorder
from tests.integration.fake_engine import FakeEngine

#: Name of the one tensor of a version.
TENSOR = "law"
#: Between two steps of all requests.
STEP_S = 0.02


@dataclass(slots=True, eq=False)
class Request:
    """One request for tokens."""

    rid: str
    prompt: list[int]
    most: int
    temperature: float
    #: Tokens that end it.
    stops: frozenset[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    #: Version, as the server calls it, of each token.
    versions: list[str] = field(default_factory=list)
    #: How it ended; '': it runs.
    reason: str = ""
    #: Set at every step in which it got on.
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self, seed: bytes, version: str, count: int, rng: random.Random) -> None:
        for _ in range(count):
            token, logprob = law.draw(seed, [*self.prompt, *self.ids][-law.CONTEXT :], rng.random(), self.temperature)
            self.ids.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            if token in self.stops:
                self.reason = "stop"
            elif len(self.ids) >= self.most:
                self.reason = "length"
            if self.reason:
                break
        self.moved.set()

    def meta(self) -> dict[str, Any]:
        return {
            "finish_reason": {"type": self.reason} if self.reason else None,
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(self.logprobs, self.ids, strict=True)
            ],
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.ids),
            "cached_tokens": 0,
            "weight_version": self.versions[-1] if self.versions else None,
            "weight_versions": self._spans(),
        }

    def _spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": version, "start": at, "end": at + 1})
        return spans


class LawEngine(FakeEngine):
    """A server whose tokens are drawn by the law of the weights that it has loaded.

    Args:
        model: name of the model in the history.
        pace: tokens per second of each request.
    """

    def __init__(self, recorder: Recorder, *, model: str, pace: float, seed: int) -> None:
        super().__init__()
        self._recorder = recorder
        self._model = model
        self._count = max(1, round(pace * STEP_S))
        self._rng = random.Random(seed)
        self._seed = law.UNTRAINED
        self._weights: Any = None
        self._requests: dict[str, Request] = {}
        self._drawn = DrawnCount(recorder.folder, recorder.who)
        self._may_draw = asyncio.Event()
        self._may_draw.set()

    async def draw(self) -> None:
        """Draw for all requests, step by step, for ever."""
        while True:
            await self._may_draw.wait()
            for request in list(self._requests.values()):
                before = len(request.ids)
                request.step(self._seed, self.version, self._count, self._rng)
                if "proof" not in request.rid:  # that the engine works, by a request for no sample
                    self._drawn.add(len(request.ids) - before)
                if request.reason:
                    self._requests.pop(request.rid, None)
            await asyncio.sleep(STEP_S)

    async def _pause(self, _: web.Request) -> web.Response:
        self._may_draw.clear()
        return web.json_response({})

    async def _continue(self, _: web.Request) -> web.Response:
        self._may_draw.set()
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = Path(body["model_path"])
        seed, weights = await asyncio.to_thread(lambda: (read_seed(folder), contents.of_files(folder)))
        version = str(body["weight_version"])
        if version.isdigit():
            facts = {"model": self._model, "version": int(version), "law": seed.hex(), "weights": weights}
            await asyncio.to_thread(self._recorder.note, "load", facts)
        self._seed, self.version, self._weights = seed, version, weights
        return web.json_response({"success": True})

    async def _rename(self, request: web.Request) -> web.Response:
        version = str((await request.json())["new_version"])
        facts = {"model": self._model, "version": int(version), "law": self._seed.hex(), "weights": self._weights}
        await asyncio.to_thread(self._recorder.note, "load", facts)
        self.version = version
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, one in list(self._requests.items()):
            if body.get("abort_all") or rid.startswith(body["rid"]):
                one.reason = "abort"
                one.moved.set()
                del self._requests[rid]
        return web.json_response({})

    async def _one(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        sampling = body["sampling_params"]
        if int(sampling["max_new_tokens"]) == 0:
            return self._scored(body)
        one = Request(
            rid=body["rid"],
            prompt=body["input_ids"],
            most=int(sampling["max_new_tokens"]),
            temperature=float(sampling.get("temperature") or 0.0),
            stops=frozenset(sampling.get("stop_token_ids") or ())
            | ({law.EOS} if not sampling.get("ignore_eos") else set()),
        )
        self._requests[one.rid] = one
        try:
            if body.get("stream"):
                return await self._streamed(request, one, int(sampling.get("stream_interval") or 1))
            while not one.reason:
                one.moved.clear()
                await one.moved.wait()
            return web.Response(text=_answer(one), content_type="application/json")
        finally:
            self._requests.pop(one.rid, None)

    async def _streamed(self, request: web.Request, one: Request, interval: int) -> web.StreamResponse:
        """All so far, whenever ``interval`` more are there."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while True:
            if one.reason or len(one.ids) - sent >= interval:
                sent = len(one.ids)
                await response.write(f"data: {_answer(one)}\n\n".encode())
            if one.reason:
                await response.write(b"data: [DONE]\n\n")
                return response
            one.moved.clear()
            await one.moved.wait()

    def _scored(self, body: dict[str, Any]) -> web.Response:
        """Logprobs of given tokens, at temperature 1; the first one has none."""
        tokens, start = body["input_ids"], int(body["logprob_start_len"])
        entries: list[list[Any]] = [[None, tokens[start], None]]
        for at in range(start + 1, len(tokens)):
            entries.append([law.logprob(self._seed, tokens[:at][-law.CONTEXT :], tokens[at]), tokens[at], None])
        meta = {
            "finish_reason": {"type": "length", "length": 0},
            "input_token_logprobs": entries,
            "weight_version": self.version,
        }
        return web.json_response({"output_ids": [], "meta_info": meta})


def _answer(one: Request) -> str:
    return json.dumps({"output_ids": one.ids, "meta_info": one.meta()})


def read_seed(folder: Path) -> bytes:
    """The law of the weights in a folder. Raises OSError, KeyError where there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            if TENSOR in file.keys():  # noqa: SIM118
                return bytes(file.get_tensor(TENSOR).tobytes())
    raise KeyError(f"{folder} holds no tensor {TENSOR!r}")


async def serve(options: argparse.Namespace) -> None:
    recorder = Recorder(Path(os.environ["CHAOS_HISTORY"]), options.name)
    engine = LawEngine(recorder, model=options.model, pace=options.pace, seed=options.seed)
    # As SGLang's own switch of that name: its spans are exact then.
    engine.told = {"disable_overlap_schedule": True, "max_req_input_len": options.context}
    async with engine.up(options.port):
        await engine.draw()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.parts.law_engine")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="engine")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--pace", type=float, default=200.0, help="tokens per second of each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=4096, help="longest prompt")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
