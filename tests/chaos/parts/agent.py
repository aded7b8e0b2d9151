"""Agents that run episodes through gateways, several at once, and note what they were answered.

python -m tests.chaos.parts.agent --config FILE --gateways URL,URL

An agent never gives up a request: it repeats it, at another gateway, until it is answered or its episode is over.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from penstock.config.load import load_config
from penstock.weights.serving import token_of
from tests.chaos.recording.recorder import Recorder

#: Turns of an episode, episodes at once, and the share of requests whose history is rewritten.
TURNS, EPISODES, REWRITTEN = 8, 8, 0.06
#: Between two attempts.
PAUSE_S = 0.2
#: Longest wait for an answer, after which an agent asks again.
PATIENCE_S = 20.0
#: The episode of a request is over, or was never there.
OVER = (401, 404, 409, 410)


class Agent:
    """One episode after another."""

    def __init__(self, session: aiohttp.ClientSession, gateways: list[str], token: str, recorder: Recorder) -> None:
        self._session = session
        self._gateways = gateways
        self._token = token
        self._recorder = recorder
        self._rng = random.Random(os.urandom(8))

    async def run(self) -> None:
        while True:
            opened = await self._post("/episodes", self._token, {"wait_s": 5})
            if opened is not None:
                await self._episode(opened)

    async def _episode(self, opened: dict[str, Any]) -> None:
        key, answers = opened["key"], list[str]()
        messages = [{"role": "user", "content": opened["prompt"]}]
        for turn in range(TURNS):
            answer = await self._post("/chat/completions", key, {"model": "any", "messages": messages})
            if answer is None:
                return
            answers.append(answer["choices"][0]["message"]["content"])
            messages += [
                {"role": "assistant", "content": answers[-1]},
                {"role": "user", "content": f"{turn}{answers[-1][:3]}"},
            ]
            if self._rng.random() < REWRITTEN:
                messages = messages[2:]
        reward = float(len("".join(answers)) % 2)
        if await self._post("/episodes/finish", key, {"reward": reward}) is not None:
            sample = f"{opened['job']}/{opened['k']}"
            self._recorder.note("finished", {"sample": sample, "answers": answers, "reward": reward})

    async def _post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer, whatever is killed meanwhile; None if the episode is over."""
        for attempt in itertools.count():
            headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(attempt)}
            url = self._rng.choice(self._gateways) + path
            try:
                async with asyncio.timeout(PATIENCE_S), self._session.post(url, json=body, headers=headers) as response:
                    if response.status == 200:
                        return dict(await response.json())
                    if response.status == 400:
                        raise RuntimeError(await response.text())
                    if response.status in OVER and path != "/episodes":
                        return None
            except (aiohttp.ClientError, OSError):  # TimeoutError is one
                pass
            await asyncio.sleep(PAUSE_S)
        raise AssertionError


async def run(gateways: list[str], token: str, recorder: Recorder) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(EPISODES):
            group.create_task(Agent(session, gateways, token, recorder).run())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.parts.agent")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--gateways", required=True)
    options = parser.parse_args()
    recorder = Recorder(Path(os.environ["CHAOS_HISTORY"]), "told-agent")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    token = token_of(load_config(options.config, []))
    asyncio.run(run([f"{url}/v1" for url in options.gateways.split(",")], token, recorder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
