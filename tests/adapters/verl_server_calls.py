"""verl's registries, and calls of its agent loops to the server behind its name: ``... RUN.yaml MODEL OUT.json``.

The server is called as an actor of Ray calls it, without Ray around it.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from penstock.consumers.adapters.inside_verl.sampling import LANE
from penstock.consumers.adapters.verl_manager import PenstockAgentLoopManager, PenstockAgentLoopWorker
from penstock.consumers.adapters.verl_server import PenstockServer, settings_of
from penstock.errors import ConfigError

#: A prompt that no worker answers.
UNANSWERED = [40]
SAID = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
DRAWN = SAID | {LANE: "train"}
GREEDY = SAID | {LANE: "eval", "temperature": 0}


class Loop(AgentLoopBase):  # type: ignore[misc]
    """An agent loop that gives back what it was given to draw by."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return sampling_params


async def lanes() -> list[str]:
    """What verl's own worker tells its loops: of training, ReMax's baseline, validation that is drawn as training."""

    async def as_it_is(output: Any, *_: object, **__: object) -> Any:
        return output

    worker = PenstockAgentLoopWorker.__new__(PenstockAgentLoopWorker)
    worker.__dict__ |= dict.fromkeys(["llm_client", "tokenizer", "processor", "hf_model_type", "dataset_cls", "tools"])
    worker.config = OmegaConf.create({"data": {}})
    worker.rollout_config = SimpleNamespace(temperature=0.8)
    worker._agent_loop_postprocess = as_it_is
    register("told")(Loop)
    kinds = ((SAID, False), (SAID | {"temperature": 0}, False), (SAID, True))
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0}
    given = [
        await worker._run_agent_loop(dict(said), trajectory | {"validate": validate}, agent_name="told")
        for said, validate in kinds
    ]
    assert [{k: v for k, v in one.items() if k != LANE} for one in given] == [said for said, _ in kinds]
    return [one[LANE] for one in given]


def newer() -> str:
    """What the manager says to verl's newer trainer."""
    try:
        PenstockAgentLoopManager(OmegaConf.create({"trainer": {"use_v1": True}}), None)
    except ConfigError as exc:
        return str(exc)
    return ""


def plain(output: Any) -> dict[str, Any]:
    return {
        "ids": output.token_ids,
        "log_probs": output.log_probs,
        "stop": output.stop_reason,
        "fields": output.extra_fields,
    }


async def calls(run: str, folder: Path) -> dict[str, Any]:
    server = PenstockServer(
        settings_of({"penstock": {"config": run}}), prompt_length=8, response_length=8, temperature=0.8
    )
    found: dict[str, Any] = {"where": await server.where(0)}
    weights = folder / "weights.safetensors"
    save_file({"weight": torch.zeros(1)}, weights)
    found["version"] = await server.update_weights(str(weights), 0)
    asked = [server.generate([2 + i], DRAWN, f"r{i}", label=f"l{i}") for i in range(4)]
    answers = await asyncio.gather(*asked, server.generate([9], GREEDY, "greedy"))
    found["answers"] = [plain(answer) for answer in answers]
    stuck = asyncio.create_task(server.generate(UNANSWERED, DRAWN, "stuck"))
    await server.generate([11], DRAWN, "beside")
    await server.abort_all_requests()
    found["aborted"] = plain(await stuck)
    found["again"] = await server.update_weights(str(weights), 1)
    found["after"] = plain(await server.generate([12], DRAWN, "after"))
    try:
        await server.generate([2], DRAWN, "image", image_data=["picture"])
    except ConfigError as exc:
        found["image"] = str(exc)
    return found


def main() -> None:
    run, model, out = sys.argv[1:]
    # As verl's configuration has it: actor_rollout_ref.model.external_lib.
    HFModelConfig(
        path=model,
        external_lib="penstock.consumers.adapters.verl_plugin",
        override_config={"attn_implementation": "eager"},
    )
    found = {
        "replica": get_rollout_replica_class("penstock").__name__,
        "adapter": get_rollout_class("penstock").__name__,
    }
    Path(out).write_text(
        json.dumps(
            found | asyncio.run(calls(run, Path(out).parent)) | {"lanes": asyncio.run(lanes()), "newer": newer()}
        )
    )


if __name__ == "__main__":
    main()
