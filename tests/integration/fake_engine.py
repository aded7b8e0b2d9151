"""A server that answers like SGLang and misbehaves on demand. For failures that a real one cannot be asked to show."""

import asyncio
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from tests.tiny_model import ALPHABET

#: Ids that it answers with, the first ones of every answer; then ``FILLER``, then eos.
FIRST, FILLER, EOS = [7, 8, 9], 10, 1
LOGPROB = -0.5
#: Longest wait at its end for answers on their way.
CLOSE_S = 2.0
#: That of every token where all are drawn alike.
FAIR_LOGPROB = -math.log(2 + len(ALPHABET))


class _BatchError(Exception):
    """The status with which one request of a batch would be answered."""


class FakeEngine:
    """Counts what it sees. Behaviour is chosen by the first token of the prompt.

    | behaviour | what a request for tokens gets                                        |
    |-----------|-----------------------------------------------------------------------|
    | (none)    | ``length`` tokens, at once, or when ``open`` is set                   |
    | 500, 400  | that status                                                           |
    | garbage   | what is not JSON                                                      |
    | short     | a logprob less than tokens                                            |
    | nan       | a logprob that is no number                                           |
    | hang      | nothing, for ever                                                     |
    | die       | half an answer; the whole server forgets its weights and its requests |
    """

    def __init__(self, *, length: int = 6) -> None:
        self.length = length
        self.behaviour: dict[int, str] = {}
        #: Every so many requests for tokens get status 500; 0: none.
        self.fails_every = 0
        #: Cleared: requests are held after ``FIRST`` until it is set, or they are aborted.
        self.open = asyncio.Event()
        self.open.set()
        #: Requests whose rid begins with one of these are held too, while ``rest`` is not set.
        self.held: tuple[str, ...] = ()
        self.rest = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        #: More of what /server_info tells.
        self.told: dict[str, Any] = {}
        #: Whether it was started with SGLANG_RETURN_ORIGINAL_LOGPROB=1.
        self.is_original = False
        self.version = "default"
        self.loads: list[str] = []
        #: Versions on which it dies of every request for tokens but a proof.
        self.deadly: set[str] = set()
        self.deaths = 0
        self.peak = 0
        #: Tokens that it makes of each image.
        self.image_tokens = 4
        #: Returns the ids of the answer to a prompt, with the sampling parameters; None: ``length`` ids.
        self.script: Callable[[list[int], dict[str, Any]], list[int]] | None = None
        #: Answers that were asked for as a stream.
        self.num_streamed = 0
        #: Batches that it received.
        self.num_batches = 0
        #: Requests whose rid begins so get six tokens.
        self.short = ""
        #: Prompts asked for, by first token.
        self.asked: Counter[int] = Counter()
        self.prompts: list[list[int]] = []
        #: Sampling parameters of these.
        self.sampling: list[dict[str, Any]] = []
        #: First tokens of prompts that were there together when it died.
        self.victims: list[list[int]] = []
        self.refuses_loads = ""
        #: Cleared: loads from the disk are held until it is set; their folders are in ``loading`` meanwhile.
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.loading: list[str] = []
        #: Reads the folder of a load: '' or what went wrong.
        self.read: Callable[[str], str] | None = None
        #: The same, told under which version.
        self.read_as: Callable[[str, str], str] | None = None
        #: How it fails to take another version for its weights: '' (it does not), 'refuses' or 'dies' (once).
        self.fails_rename = ""
        #: It dies once in a load from a folder whose name begins so; '': in none.
        self.dies_loading = ""
        #: Set: every connection is cut, as if nobody were there.
        self.is_away = False
        #: Tokens drawn for nobody, to see that it serves.
        self.proofs = 0
        #: True: it gives memory back when it is told to.
        self.saves_memory = False
        #: What its weights are, and what they were when a snapshot was taken.
        self.weights, self.snapshot = "mine", ""
        #: Paths asked for, in order; requests for tokens and health checks are left out.
        self.controls: list[str] = []
        self._running: dict[str, tuple[int, asyncio.Event, web.Request]] = {}
        self._server: TestServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return str(self._server.make_url("")).rstrip("/")

    @property
    def num_running(self) -> int:
        return len(self._running)

    def let_go(self) -> None:
        """Set ``rest``, from any thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.rest.set)

    def let_load(self) -> None:
        """Set ``may_load``, from any thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.may_load.set)

    @asynccontextmanager
    async def up(self, port: int | None = None) -> AsyncIterator["FakeEngine"]:
        """Serve on loopback, at a free port unless one is given."""
        self.loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[self._met])
        app.add_routes(
            [
                web.get("/health", self._fine),
                web.get("/server_info", self._info),
                web.get("/model_info", self._info),
                web.get("/v1/loads", self._loads),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/parse_function_call", self._parse_calls),
                web.post("/separate_reasoning", self._separate_reasoning),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._fine),
                web.post("/release_memory_occupation", self._fine),
                web.post("/resume_memory_occupation", self._fine),
                web.post("/weights_checker", self._check_weights),
                web.get("/metrics", self._metrics),
                web.post("/update_weights_from_disk", self._load),
                web.post("/update_weight_version", self._rename),
                web.post("/update_weights_from_tensor", self._load),
            ]
        )
        self._server = TestServer(app, port=port)
        await self._server.start_server(shutdown_timeout=CLOSE_S)
        try:
            yield self
        finally:
            self._cut_all()
            await self._server.close()

    def _cut_all(self) -> None:
        for _, aborted, request in list(self._running.values()):
            if request.transport is not None:
                request.transport.abort()
            aborted.set()

    def die(self) -> None:
        """Lose every connection and all weights, as a restart does."""
        self.deaths += 1
        self.victims.append(sorted(first for first, _, _ in self._running.values()))
        self.version = "default"
        self._cut_all()

    @web.middleware
    async def _met(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.is_away:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        if request.path not in ("/generate", "/server_info", "/model_info", "/health"):
            self.controls.append(request.path)
        return await handler(request)

    async def _fine(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        return await self._fine(request)

    async def _continue(self, request: web.Request) -> web.Response:
        return await self._fine(request)

    async def _info(self, _: web.Request) -> web.Response:
        info = {"version": "0.5.20", "disable_overlap_schedule": True, "weight_version": self.version}
        info |= {"enable_memory_saver": self.saves_memory, "stream_interval": 1}
        return web.json_response(info | {"model_path": "/model", "tp_size": 1, "dp_size": 1} | self.told)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'# TYPE sglang:runs gauge\nsglang:runs{{model="m"}} {self.num_running}\n')

    async def _check_weights(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        if action == "snapshot":
            self.snapshot = self.weights
        elif action == "reset_tensors":
            self.weights = "noise"
        elif action == "compare" and self.weights != self.snapshot:
            return web.json_response({"success": False, "message": "tensors differ"}, status=400)
        return web.json_response({"success": True, "message": "", "per_engine_checksum": self.weights})

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.num_running, "num_waiting_reqs": 0}]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuses_loads:
            return web.json_response({"success": False, "message": self.refuses_loads}, status=400)
        self.loading.append(body["model_path"])
        await self.may_load.wait()
        self.loading.remove(body["model_path"])
        if self.dies_loading and Path(body["model_path"]).name.startswith(self.dies_loading):
            self.dies_loading = ""
            self.die()
            assert request.transport is not None
            request.transport.abort()
            return web.json_response({})
        if self.read_as is not None:
            await asyncio.to_thread(self.read_as, body["model_path"], body["weight_version"])
        if self.read is not None and (failure := await asyncio.to_thread(self.read, body["model_path"])):
            return web.json_response({"success": False, "message": failure}, status=400)
        self.version = body["weight_version"]
        self.loads.append(self.version)
        return web.json_response({"success": True})

    async def _rename(self, request: web.Request) -> web.Response:
        fails, self.fails_rename = self.fails_rename, ""
        if fails == "dies":
            self.die()
            assert request.transport is not None
            request.transport.abort()
        if fails:
            return web.json_response({"success": False, "message": "not now"}, status=500)
        self.version = str((await request.json())["new_version"])
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, (_, aborted, _) in self._running.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                aborted.set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if isinstance(body["rid"], list):
            return await self._batch(request, body)
        return await self._one(request, body)

    async def _parse_calls(self, request: web.Request) -> web.Response:
        """Find calls as the parser ``qwen25`` does; any other name is an error."""
        body = await request.json()
        names = [tool["function"]["name"] for tool in body["tools"]]
        if body["tool_call_parser"] != "qwen25":
            return web.Response(text="Internal Server Error", status=500)
        rest, *parts = body["text"].split("<tool_call>\n")
        made = [json.loads(part.partition("\n</tool_call>")[0]) for part in parts]
        calls = [
            {"tool_index": 0, "name": one["name"], "parameters": json.dumps(one["arguments"])}
            for one in made
            if one["name"] in names
        ]
        return web.json_response({"normal_text": rest.strip() if parts else rest, "calls": calls})

    async def _separate_reasoning(self, request: web.Request) -> web.Response:
        """Find reasoning as the parser ``qwen3`` does."""
        before, end, after = (await request.json())["text"].partition("</think>")
        reasoning = before.removeprefix("<think>").strip() if end else ""
        return web.json_response({"reasoning_text": reasoning, "text": after.strip() if end else before})

    def _behaviour_of(self, prompt: list[int]) -> str:
        if self.fails_every and sum(self.asked.values()) % self.fails_every == 0:
            return "500"
        return "die" if self.version in self.deadly else self.behaviour.get(prompt[0], "")

    async def _batch(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer the requests of a batch in one stream; an error of one ends it."""
        self.num_batches += 1
        named = zip(body["input_ids"], body["rid"], body["sampling_params"], strict=True)
        ones = [
            body | {"input_ids": ids, "rid": rid, "sampling_params": sampling, "stream": False}
            for ids, rid, sampling in named
        ]
        if self._behaviour_of(ones[0]["input_ids"]) == "die":
            return await self._one(request, ones[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def answer(index: int, one: dict[str, Any]) -> None:
            done = await self._one(request, one)
            assert isinstance(done, web.Response)
            if done.status != 200 or not str(done.text).startswith("{"):
                raise _BatchError(done.status)
            event = {"index": index} | json.loads(str(done.text))
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        tasks = [asyncio.create_task(answer(index, one)) for index, one in enumerate(ones)]
        try:
            await asyncio.gather(*tasks)
        except _BatchError as exc:
            error = {"error": {"message": "an error of one request", "code": exc.args[0]}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
        finally:
            for task in tasks:
                task.cancel()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _one(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body["input_ids"]
        assert prompt, "an empty prompt kills a real server"
        if body["rid"].startswith("proof:"):
            self.proofs += 1
            return await self._answer(request, body, None, self.behaviour.get(prompt[0], ""))
        self.asked[prompt[0]] += 1
        self.prompts.append(prompt)
        self.sampling.append(body["sampling_params"])
        aborted = asyncio.Event()
        self._running[body["rid"]] = (prompt[0], aborted, request)
        self.peak = max(self.peak, len(self._running))
        try:
            return await self._answer(request, body, aborted, self._behaviour_of(prompt))
        finally:
            del self._running[body["rid"]]

    async def _answer(
        self, request: web.Request, body: dict[str, Any], aborted: asyncio.Event | None, behaviour: str
    ) -> web.StreamResponse:
        match behaviour:
            case "500" | "400":
                return web.json_response({"error": f"told to answer {behaviour}"}, status=int(behaviour))
            case "garbage" if body.get("stream"):
                return web.Response(text="data: <html>\n\n", content_type="text/event-stream")
            case "garbage":
                return web.Response(text="<html>")
            case "hang":
                await asyncio.Event().wait()
            case "die":
                # Whoever came with it is there by now.
                await asyncio.sleep(0.05)
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"text": ')
                self.die()
                if request.transport is not None:
                    request.transport.abort()
                return response
        budget = int(body["sampling_params"]["max_new_tokens"])
        if budget == 0:
            return self._scores(body["input_ids"][body["logprob_start_len"] :])
        length = 6 if self.short and body["rid"].startswith(self.short) else self.length
        answer = [*FIRST, *[FILLER] * (length - 4), EOS]
        if self.script is not None and aborted is not None:
            answer = self.script(body["input_ids"], body["sampling_params"])
        ids = answer[:budget]
        stream = await self._stream(request, body, ids[: len(FIRST)]) if body.get("stream") else None
        finish = {"type": "length"} if len(answer) > budget else {"type": "stop"}
        held_by = self.rest if body["rid"].startswith(self.held) else self.open
        if aborted is not None and not held_by.is_set():
            waits = [asyncio.create_task(event.wait()) for event in (held_by, aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if aborted.is_set():
                ids, finish = FIRST[:budget], {"type": "abort", "message": "as asked"}
        hot = body["sampling_params"].get("temperature", 1.0) > 100 and not self.is_original
        logprobs: list[Any] = [[FAIR_LOGPROB if hot else LOGPROB, token, None] for token in ids]
        if behaviour == "short":
            logprobs.pop()
        if behaviour == "nan":
            logprobs[0] = [None, ids[0], None]
        meta = {
            "finish_reason": finish,
            "output_token_logprobs": logprobs,
            "prompt_tokens": len(body["input_ids"]) + (self.image_tokens - 1) * len(body.get("image_data", ())),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}] if ids else [],
        }
        text = json.dumps({"output_ids": ids, "meta_info": meta})
        if stream is not None:
            await stream.write(b"data: " + text.encode() + b"\n\ndata: [DONE]\n\n")
            return stream
        return web.Response(text=text, content_type="application/json")

    def _scores(self, tokens: list[int]) -> web.Response:
        """A token's logprob is minus its id over a hundred; the first one has none."""
        entries = [[None, tokens[0], None], *([-token / 100, token, None] for token in tokens[1:])]
        meta = {
            "finish_reason": {"type": "length", "length": 0},
            "input_token_logprobs": entries,
            "weight_version": self.version,
        }
        return web.json_response({"output_ids": [], "meta_info": meta})

    async def _stream(self, request: web.Request, body: dict[str, Any], ids: list[int]) -> web.StreamResponse:
        """The beginning of a streamed answer: the first tokens, as all so far."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        meta = {
            "finish_reason": None,
            "output_token_logprobs": [[LOGPROB, token, None] for token in ids],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self.version,
        }
        event = json.dumps({"output_ids": ids, "meta_info": meta})
        await response.write(b"data: " + event.encode() + b"\n\n")
        self.num_streamed += 1
        return response


async def _serve(arguments: list[str]) -> None:
    """As launch_server does, of whose command line it takes what it needs."""
    given = dict(itertools.pairwise(arguments))
    engine = FakeEngine()
    engine.version = given.get("--weight-version", "default")
    async with engine.up(int(given["--port"])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv))
