"""Prompts with images, drawn by a real SGLang server: against transformers, and inside verl (T6)."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.protocol.audit import audit
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.engine_fixtures import cpu_engine, up
from tests.integration.parts import buffering, until
from tests.integration.worker_play import make_config
from tests.missing import lack, need
from tests.tiny_vision import asked, make_tiny_vision, png
from tests.wide.foreign import PROCESS_S, PYTHON, run_inside, working

#: torchvision, which verl's processors need, and nobody else of that environment has (Makefile).
TORCHVISION = os.environ.get("PENSTOCK_ADAPTERS_VISION", ".adapters/vision")
N, TEMPERATURE = 3, 0.8
#: What engine and trainer compute in different orders.
NEAR, FAR = 2e-3, 2e-2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(PROCESS_S + 60)]


@pytest.fixture(scope="module")
def vision_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two that differ in their weights; servers start with the first."""
    root = tmp_path_factory.mktemp("vision")
    return [make_tiny_vision(root / f"w{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def vision_url(vision_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that sees images."""
    model = ModelConfig(path=str(vision_models[0]), dtype="float32")
    # Pictures of several requests are told apart, and parts of prompts before them may be shared.
    server = asyncio.run(up(cpu_engine(), model, tmp_path_factory.mktemp("vision-engine")))
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, vision_models: list[Path], vision_url: str, tmp_path: Path) -> Config:
    model = ModelConfig(path=str(vision_models[0]), dtype="float32")
    sampling = {"max_new_tokens": 12, "temperature": TEMPERATURE}
    return make_config(
        redis_server.url, keys, model, tmp_path,
        engine={"url": vision_url, "health_timeout_s": 20.0},
        rollout={"n": N, "sampling": sampling, "max_context_tokens": 96},
        reward={"function": "tests.adapters.rewards:last_digit"},
        trainer={"batch_groups": 2},
        staleness={"mode": "async", "bound": 1},
    )  # fmt: skip


def ask(client: redis.Redis, keys: Keys, first: int, *prompts: tuple[str, list[bytes]]) -> None:
    jobs = [Job(f"d/0/{first + i}", N, prompt=text, images=images) for i, (text, images) in enumerate(prompts)]
    assert play.admit(client, keys, jobs).admitted == len(jobs)


def load(folder: Path) -> Any:
    from transformers import Qwen2VLForConditionalGeneration

    return Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_of(model: Any, tokens: list[int], images: list[bytes], folder: Path) -> torch.Tensor:
    """[L - 1] of each token but the first, by transformers alone: files, their processor, and its own positions."""
    import io

    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    ids = torch.tensor([tokens])
    inputs = processor([Image.open(io.BytesIO(one)) for one in images], return_tensors="pt")
    kinds = (ids == model.config.image_token_id).int()
    # The place of an image that was drawn ends an answer, and is none.
    kinds[0, -1] = 0
    ids = torch.where((ids == model.config.image_token_id) & (kinds == 0), 0, ids)
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits[0, :-1].double()
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def gaps(batch: Any, model: Any, images: dict[str, list[bytes]], folder: Path) -> dict[str, float]:
    """Largest difference of each job between what was recorded and what ``model`` gives."""
    arrays, found = batch.arrays(), dict.fromkeys(images, 0.0)
    for i, row in enumerate(batch.rows):
        length = int(arrays["lengths"][i])
        expected = logprobs_of(model, arrays["tokens"][i, :length].tolist(), images[row.job], folder)
        drawn = torch.from_numpy(arrays["generated"][i, 1:length])
        recorded = torch.from_numpy(arrays["logprobs"][i, 1:length])
        found[row.job] = max(found[row.job], float((expected - recorded)[drawn].abs().max()))
    return found


def test_T6_what_is_recorded_of_prompts_with_images_is_what_transformers_computes_before_and_after_an_update(
    config: Config, client: redis.Redis, keys: Keys, vision_models: list[Path], tmp_path: Path
) -> None:
    wide, tall = png(1, 3, 2), png(2, 2, 3)
    prompts = [(asked("a", "b="), [wide]), (asked("a", "b", "c="), [tall, wide])]
    models = [load(folder) for folder in vision_models]
    with buffering(config), working(config, tmp_path), Trainer(config) as trainer:
        for version, model in enumerate(models, 1):
            trainer.publish(model)
            first = 2 * (version - 1)
            ask(client, keys, first, *prompts)
            batch = trainer.next(timeout=200)
            images = {f"d/0/{first + i}": held for i, (_, held) in enumerate(prompts)}
            assert {row.job for row in batch.rows} == images.keys()
            assert {(row.oldest, row.newest) for row in batch.rows} == {(version, version)}
            found = gaps(batch, model, images, vision_models[0])
            assert max(found.values()) < NEAR
            # So that the tolerance proves something: other weights, and other images, are far away.
            assert min(gaps(batch, models[2 - version], images, vision_models[0]).values()) > FAR
            others = {
                job: [png(9, 3, 2) if one == wide else png(8, 2, 3) for one in held] for job, held in images.items()
            }
            assert min(gaps(batch, model, others, vision_models[0]).values()) > FAR
            grids = {row.job: grid.tolist() for row, grid in zip(batch.rows, batch.side("image_grid_thw"), strict=True)}
            assert list(grids[f"d/0/{first + 1}"]) == [[1, 6, 4], [1, 4, 6]]
            assert len({array.tobytes() for array in batch.side("pixel_values") if array is not None}) == 2
            trainer.commit(batch)
        trainer.publish(models[0])
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "retired") == 4, "groups to retire")
    assert not list(client.scan_iter(match=keys.of("side:*").replace("{", "[{]"), count=1000))
    assert audit(client, keys).ok
    assert np.isfinite(batch.advantages).all()


def test_T6_verl_computes_what_was_recorded_of_prompts_with_images_and_trains_on_them(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    need(PYTHON, "adapters")
    if not (Path(TORCHVISION) / "torchvision").is_dir():
        lack(f"{TORCHVISION} has no torchvision: run make adapters")
    found = run_inside("tests.adapters.verl_vision", config, client, keys, tmp_path, 4, TORCHVISION)
    assert "give from_batch(processor=...)" in found["without"]
    for batch, version in ((found["first"], 1), (found["second"], 2)):
        assert batch["difference"] < NEAR
        assert batch["tokens"] > 2 * N
        assert batch["versions"] == [version]
        assert batch["positions"][:2] == [2 * N, 4]
        assert batch["inputs"] == ["image_grid_thw", "images_seqlens", "pixel_values"]
    # So that the tolerance proves something.
    assert found["one_axis"] > FAR
    assert found["others_images"] > FAR
    assert found["grad_norm"] > 0
    assert found["moved"] > FAR
