"""Two ranks train and publish models of other shapes as one rank does: with a vision tower, with tied embeddings."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.shards import shard
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.weights.sources import State
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.records.job import Job
from penstock.records.sample import Sample
from tests.batch_factory import with_sides
from tests.tiny_vision import PREPARE

WORLD = 2


def samples(with_images: list[bool]) -> tuple[list[Sample], dict[str, Any]]:
    """Two answers to each prompt, and the images of the prompts that have one."""
    tokenizer, found, sides = PREPARE.make_tokenizer(), [], {}
    pad, begin, end = map(tokenizer.convert_tokens_to_ids, ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"))
    random = np.random.default_rng(0)
    for number, has_image in enumerate(with_images):
        prompt = [begin, *[pad] * 4, end, 20, 21] if has_image else [20, 21, 22, 23]
        job = Job(f"t/0/{number}", 2, prompt_ids=prompt, sampling={"temperature": 1.0})
        for k in range(2):
            sample = Sample(job, k)
            sample.append(prompt)
            sample.prompt_length = len(prompt)
            sample.append([int(one) for one in random.integers(30, 60, 3 + k)], version=5, logprobs=[-5.0] * (3 + k))
            sample.reward, sample.status, sample.finish_reason = float(k), "completed", "stop"  # type: ignore[assignment]
            found.append(sample)
            if has_image:
                pixels = random.standard_normal((16, 1176)).astype(np.float32)
                sides[sample.id] = {PIXEL_VALUES: pixels, IMAGE_GRID: np.array([[1, 4, 4]], np.int64)}
    return found, sides


def gradients(rank: int, size: int, with_images: list[bool], num_samples: int) -> dict[str, Tensor | None]:
    """Gradients of one step, in which a micro-batch is one sample and ranks fill up with samples of no loss."""
    model = PREPARE.make_model(PREPARE.Settings(hidden=64, mlp=64, heads=2), PREPARE.make_tokenizer()).float()
    policy = Policy(model, torch.float32)
    if size > 1:
        shard(policy)
    ours, sides = samples(with_images)
    ours = ours[:num_samples]
    sides = {one.id: sides[one.id] for one in ours if one.id in sides}
    batch = with_sides(ours, sides, dp_rank=rank, dp_size=size, split="strided")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    config = TrainerConfig(lr=0.0, max_grad_norm=1e9, correction="bypass")
    GRPO(policy, optimizer, config, dp_size=size, max_samples=1).step(batch)
    full: Callable[[Any], Tensor | None] = lambda one: one.full_tensor() if hasattr(one, "full_tensor") else one  # noqa: E731
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def published(folder: Path, size: int) -> list[str]:
    """Names of the tensors that are published of a model in a folder; [] on other ranks."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = Policy(model, torch.float32)
    if size > 1:
        shard(policy)
    return [name for name, _ in State(model).tensors(json.loads((folder / "config.json").read_text()))]


CASES = {"filler": ([True, True], 3), "mixed": ([True, False], 4)}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        found = {case: gradients(rank, WORLD, *how) for case, how in CASES.items()}
        torch.save([found, published(Path(folder) / "tied", WORLD)], f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose class ties its embeddings, which its config.json does not say."""
    from transformers import GemmaConfig, GemmaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tied"
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    GemmaForCausalLM(GemmaConfig(**sizes, **heads)).float().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ranks(tied: Path) -> list[Any]:
    mp.spawn(run_rank, args=(str(tied.parent),), nprocs=WORLD)
    return [torch.load(tied.parent / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_T10_a_rank_without_images_has_the_gradient_of_one_rank(ranks: list[Any], case: str) -> None:
    torch.set_num_threads(1)
    wanted = gradients(0, 1, *CASES[case])
    assert any("visual" in name and one is not None and bool(one.any()) for name, one in wanted.items())
    for found, _ in ranks:
        for name, gradient in wanted.items():
            assert gradient is not None
            assert torch.allclose(found[case][name], gradient, rtol=1e-4, atol=1e-6), name


def test_tied_embeddings_are_published_once_by_two_ranks(ranks: list[Any], tied: Path) -> None:
    wanted = published(tied, 1)
    assert "lm_head.weight" not in wanted
    assert [names for _, names in ranks] == [wanted, []]
