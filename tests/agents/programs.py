"""Run one episode by a framework for agents, of which only the address and the key are set.

python -m tests.agents.programs NAME URL TOKEN    (in the environment .agents)

Prints the framework's result as JSON.
"""

import asyncio
import json
import sys
from typing import Any

import httpx


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def openai_agents(episode: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
    """Run an agent with a tool, and a second user message on its session."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"])
    agent = Agent(
        name="adder",
        instructions="Use the tool.",
        model=OpenAIChatCompletionsModel("policy", client),
        model_settings=ModelSettings(temperature=0.1, extra_body={"top_k": 5}, include_usage=True),
        tools=[function_tool(add)],
    )

    async def run(given: Any) -> Any:
        if not streams:
            return await Runner.run(agent, given)
        result = Runner.run_streamed(agent, given)
        async for _ in result.stream_events():
            pass
        return result

    first = await run(episode["prompt"])
    second = await run([*first.to_input_list(), {"role": "user", "content": "And doubled?"}])
    return {"answers": [first.final_output, second.final_output], "reward": 1.0}


async def openai_agents_streamed(episode: dict[str, Any]) -> dict[str, Any]:
    return await openai_agents(episode, streams=True)


def _smolagents(episode: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    import smolagents

    model = smolagents.OpenAIModel("policy", api_base=episode["base_url"], api_key=episode["key"])
    agent = getattr(smolagents, kind)(tools=[smolagents.tool(add)], model=model, max_steps=5, verbosity_level=0, **more)
    return {"answers": [agent.run(episode["prompt"])], "reward": 1.0}


async def smolagents_calls(episode: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(_smolagents, episode, "ToolCallingAgent")


async def smolagents_code(episode: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(_smolagents, episode, "CodeAgent")


async def _verifiers(episode: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    import verifiers as vf
    from datasets import Dataset
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    def right(completion: Any, answer: str) -> float:
        return float(answer in str(completion[-1]["content"]))

    row = {"question": episode["prompt"], "answer": episode["label"]}
    environment = getattr(vf, kind)(
        dataset=Dataset.from_list([row]), system_prompt="Add.", rubric=vf.Rubric(funcs=[right]), **more
    )
    client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"])
    sampling = {"temperature": 1.0, "max_tokens": 400, "extra_body": {"min_p": 0.1, "return_token_ids": True}}
    result = await environment.generate(
        environment.get_dataset(), OpenAIChatCompletionsClient(client), "policy", sampling_args=sampling
    )
    (output,) = result["outputs"]
    return {"answers": [output["completion"][-1]["content"]], "reward": output["reward"]}


async def verifiers_single(episode: dict[str, Any]) -> dict[str, Any]:
    return await _verifiers(episode, "SingleTurnEnv")


async def verifiers_tools(episode: dict[str, Any]) -> dict[str, Any]:
    return await _verifiers(episode, "ToolEnv", tools=[add])


def main(name: str, url: str, token: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as http:

        def post(path: str, key: str, body: dict[str, Any]) -> Any:
            return http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).raise_for_status().json()

        episode = post("/v1/episodes", token, {"wait_s": 60})
        done = asyncio.run(globals()[name](episode))
        post("/v1/episodes/finish", episode["key"], {"reward": done["reward"]})
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
