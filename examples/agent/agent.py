"""Run episodes of examples/agent: ask the policy to sort five digits, up to two times, and report the score.

TOKEN=... python examples/agent/agent.py [--gateway URL] [--episodes N]
Runs until it is ended. TOKEN is one of the run's agents.clients.
"""

import argparse
import asyncio
import os
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI

#: Score of a right answer, by the number of the question.
SCORES = (1.0, 0.5)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def play(client: AsyncOpenAI, episode: dict[str, Any]) -> float:
    agent, messages = client.with_options(api_key=episode["key"]), list[Any]()
    for score in SCORES:
        messages.append({"role": "user", "content": episode["prompt"]})
        answer = await agent.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        if messages[-1]["content"] == episode["label"]:
            return score
    return 0.0


async def run_episodes(http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    while True:
        try:
            opened = await http.post("/episodes", json={"wait_s": 20}, headers=bearer(os.environ["TOKEN"]))
            if opened.status_code != 429:  # none was open
                episode = opened.raise_for_status().json()
                end = {"reward": await play(client, episode)}
                await http.post("/episodes/finish", json=end, headers=bearer(episode["key"]))
        except httpx.TransportError:  # the gateway does not run yet, or has ended
            await asyncio.sleep(1)
        except (httpx.HTTPError, APIError) as exc:
            print(f"episode failed: {exc}", flush=True)


async def main(gateway: str, episodes: int) -> None:
    print(f"{episodes} episodes at once, by {gateway}", flush=True)
    async with httpx.AsyncClient(base_url=gateway, timeout=120) as http:
        client = AsyncOpenAI(base_url=gateway, api_key="of each episode")
        await asyncio.gather(*(run_episodes(http, client) for _ in range(episodes)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", default="http://127.0.0.1:8900/v1")
    parser.add_argument("--episodes", type=int, default=64, help="at once")
    options = parser.parse_args()
    asyncio.run(main(options.gateway, options.episodes))
