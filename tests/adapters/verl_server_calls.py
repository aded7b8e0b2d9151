"""verl's registries, and calls of its agent loops to the server behind its name: ``... RUN.yaml MODEL OUT.json``.

The server is called as an actor of Ray calls it, without Ray around it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from consumers.adapters.verl_server import PenstockServer, settings_of

#: A prompt that no worker answers.
UNANSWERED = [40]
DRAWN = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
GREEDY = DRAWN | {"temperature": 0}


def plain(output: Any) -> dict[str, Any]:
    return {
        "ids": output.token_ids,
        "log_probs": output.log_probs,
        "stop": output.stop_reason,
        "fields": output.extra_fields,
    }


async def calls(run: str, folder: Path) -> dict[str, Any]:
    server = PenstockServer(
        settings_of({"penstock": {"config": run}}), prompt_length=8, response_length=8, sampling=DRAWN
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
    except Exception as exc:
        found["image"] = str(exc)
    return found


def main() -> None:
    run, model, out = sys.argv[1:]
    # As verl's configuration has it: actor_rollout_ref.model.external_lib.
    HFModelConfig(
        path=model, external_lib="consumers.adapters.verl_plugin", override_config={"attn_implementation": "eager"}
    )
    found = {
        "replica": get_rollout_replica_class("penstock").__name__,
        "adapter": get_rollout_class("penstock").__name__,
    }
    Path(out).write_text(json.dumps(found | asyncio.run(calls(run, Path(out).parent))))


if __name__ == "__main__":
    main()
