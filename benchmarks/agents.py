"""Compare chat completions through penstock's gateway with those of the engine's own endpoint: tokens/s, latency.

One SGLang server with random weights. Agents, each with the official ``openai`` client, run episodes of a few turns
whose history grows; answers have a fixed length (``ignore_eos``). Two legs, alternated over several rounds:

    direct     SGLang's /v1/chat/completions, nothing kept
    penstock   ``penstock serve`` -> ``penstock worker`` (engine.url): each turn stored before its answer leaves

``ratio``: median over the rounds of penstock's tokens/s over those of the direct round beside it.

    python -m benchmarks.agents --json FILE
    python -m benchmarks.agents --device cuda --hidden 896 --layers 24 --heads 14 --kv-heads 2 --mlp 4864 \\
        --vocab 151936 --dtype bfloat16 --episodes 200 --concurrency 200 --new-tokens 256
"""

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.bench_run import DATASET, admit, part
from benchmarks.common import Report, execute, median, percentile, redis_server, run_together, spread, versions
from benchmarks.engine_overhead import GROUP, ROUND_TIMEOUT_S, Load, Penstock, running_penstock
from benchmarks.options import Concurrency, Device, EngineArgs, EngineEnv, EnginePython, JsonFile, served
from benchmarks.random_model import Shape
from penstock.names import AGENT
from penstock.records.job import Job
from penstock.redis.connect import connect
from penstock.system.processes import free_port
from penstock.weights.serving import token_of

TEMPLATE = (
    "{% for one in messages %}{{ one.role[0] }}>{{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
#: Most tokens of a turn's question, with its marks.
QUESTION = 24


def run_agents(
    barrier: Any, url: str, token: str, episodes: int, turns: int, concurrency: int, new_tokens: int
) -> dict[str, Any]:
    """Run episodes at ``url``; ``token`` opens them, empty at an engine. Returns rate and latencies."""
    return asyncio.run(_run_agents(barrier, url, token, episodes, turns, concurrency, new_tokens))


async def _run_agents(
    barrier: Any, url: str, token: str, episodes: int, turns: int, concurrency: int, new_tokens: int
) -> dict[str, Any]:
    import openai

    latencies: list[float] = []
    tokens, room = 0, asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=url, api_key=token or "none", timeout=ROUND_TIMEOUT_S) as client:

        async def run_episode(number: int) -> None:
            nonlocal tokens
            async with room:
                key = ""
                if token:
                    opened: Any = await client.post("/episodes", cast_to=object, body={"wait_s": 60})
                    key = opened["key"]
                agent = client.with_options(api_key=key) if key else client
                # The run's sampling has it.
                more = None if key else {"ignore_eos": True}
                messages: list[Any] = [{"role": "user", "content": f"question {number:06d}"}]
                for turn in range(turns):
                    began_s = time.monotonic()
                    done = await agent.chat.completions.create(
                        model="default", messages=messages, max_tokens=new_tokens, extra_body=more
                    )
                    latencies.append(time.monotonic() - began_s)
                    tokens += done.usage.completion_tokens if done.usage else 0
                    messages += [
                        {"role": "assistant", "content": done.choices[0].message.content or ""},
                        {"role": "user", "content": f"and {turn}"},
                    ]
                if key:
                    await agent.post("/episodes/finish", cast_to=object, body={"reward": 1.0})

        barrier.wait()
        began_s = time.monotonic()
        await asyncio.gather(*(run_episode(number) for number in range(episodes)))
        seconds = time.monotonic() - began_s
    return {"tokens_per_s": tokens / seconds, "p50_s": median(latencies), "p99_s": percentile(latencies, 99)}


def through_penstock(penstock: Penstock, url: str, episodes: int, **load: int) -> dict[str, Any]:
    """Run ``episodes`` episodes through the gateway at ``url``, and read them as a trainer does. Blocks."""
    jobs = [
        Job(f"{DATASET}/0/{penstock.admitted + i}", GROUP, prompt="question", environment=AGENT)
        for i in range(episodes // GROUP)
    ]
    admit(penstock.control, penstock.config, jobs, penstock.admitted)
    penstock.admitted += len(jobs)
    arguments = {"url": url, "token": token_of(penstock.config), "episodes": episodes, **load}
    done: dict[str, Any] = run_together({"agents": (run_agents, arguments)})["agents"]
    samples = 0
    while samples < episodes:
        batch = penstock.trainer.next(timeout=ROUND_TIMEOUT_S)
        samples += len(batch)
        penstock.trainer.commit(batch)
    penstock.trainer.state_dict()
    penstock.trainer.checkpointed()
    return done


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
    episodes: Annotated[int, typer.Option(help="Of a round; a multiple of 32.")] = 64,
    turns: Annotated[int, typer.Option(help="Of each episode.")] = 3,
    concurrency: Concurrency = 16,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each leg.")] = 3,
    hidden: Annotated[int, typer.Option(help="Shape of the model, as in a Qwen2 config.")] = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 768,
    vocab: int = 4096,
    dtype: str = "float32",
) -> None:
    """Chat completions through penstock's gateway over those of the engine's own endpoint."""
    context = turns * (new_tokens + QUESTION)
    shape = Shape(hidden, layers, heads, kv_heads, mlp, vocab, max(4096, context), dtype)
    load = {"turns": turns, "concurrency": concurrency, "new_tokens": new_tokens}
    found: dict[str, list[dict[str, Any]]] = {"direct": [], "penstock": []}
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        template = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")), "chat.jinja")
        template.write_text(TEMPLATE)
        engine = stack.enter_context(
            served(shape, device, concurrency, engine_python, engine_arg, engine_env, {"chat-template": str(template)})
        )
        (engine.model / "chat_template.jinja").write_text(TEMPLATE)
        port = free_port()
        sections: dict[str, dict[str, Any]] = {
            "data": {"train": [{"name": DATASET, "path": str(engine.folder / "none.jsonl"), "environment": AGENT}]},
            "rollout": {"sampling": {"max_new_tokens": new_tokens, "ignore_eos": True}, "max_context_tokens": context},
            "agents": {"port": port},
            "worker": {"slots": max(concurrency, GROUP)},
        }
        whole = Load(0, concurrency, QUESTION, context)
        penstock = stack.enter_context(running_penstock(url, engine, whole, 4, sections=sections))
        stack.enter_context(part(penstock.config, "serve"))
        gateway = f"http://127.0.0.1:{port}/v1"
        through_penstock(penstock, gateway, 32, **load)
        for turn in range(rounds):
            for leg in found if turn % 2 == 0 else reversed(found):
                if leg == "direct":
                    arguments = {"url": f"{engine.url}/v1", "token": "", "episodes": episodes, **load}
                    found[leg].append(run_together({"agents": (run_agents, arguments)})["agents"])
                else:
                    found[leg].append(through_penstock(penstock, gateway, episodes, **load))
                typer.echo(f"round {turn + 1} of {rounds}, {leg}: {found[leg][-1]}", err=True)
        fsync = connect(url).config_get("appendfsync")["appendfsync"]
        seen = versions(connect(url), sglang=engine.sglang)
    report(found, load, episodes, shape, seen, str(fsync)).finish(json_file)


def report(
    found: dict[str, list[dict[str, Any]]],
    load: dict[str, int],
    episodes: int,
    shape: Shape,
    seen: dict[str, str],
    fsync: str,
) -> Report:
    """Medians, and the ratio of the rounds beside each other."""
    pairs = list(zip(found["direct"], found["penstock"], strict=True))
    ratios = [ours["tokens_per_s"] / plain["tokens_per_s"] for plain, ours in pairs]
    rows = [
        {
            "leg": leg,
            "tokens_per_s": median([one["tokens_per_s"] for one in rounds]),
            "spread": spread([one["tokens_per_s"] for one in rounds]),
            "p50_ms": 1000 * median([one["p50_s"] for one in rounds]),
            "p99_ms": 1000 * median([one["p99_s"] for one in rounds]),
            "rounds": rounds,
        }
        for leg, rounds in found.items()
    ]
    return Report(
        title=f"agents: {episodes} episodes of {load['turns']} turns of {load['new_tokens']} tokens, "
        f"{load['concurrency']} at once, a model of {shape.num_parameters / 1e6:.1f} M parameters",
        columns={
            "leg": "leg", "tokens_per_s": "tokens/s", "spread": "spread", "p50_ms": "p50 ms/turn", "p99_ms": "p99",
        },
        rows=rows,
        keys={
            "ratio": median(ratios),
            "added_p50_ms": 1000 * median([ours["p50_s"] - plain["p50_s"] for plain, ours in pairs]),
        },
        versions=seen,
        notes=[f"Ratios of the rounds: {', '.join(f'{one:.3f}' for one in ratios)}.", f"Redis: appendfsync {fsync}."],
    )  # fmt: skip


if __name__ == "__main__":
    execute(main)
