"""Batches as the buffer would cut them, drawn by a tiny model, for tests of what trainers do with them."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock import payloads
from penstock.consumers.batch import advantages
from penstock.consumers.batch.batch import Batch
from penstock.payloads import sides
from penstock.records.job import Job
from penstock.records.manifest import Manifest, Row
from penstock.records.sample import Sample

EOS = 1
VOCABULARY = 16


def tiny_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2 of 3k parameters with random weights, peaked enough that a wrong position is seen."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        initializer_range=0.4,
    )
    model: Any = Qwen2ForCausalLM(config)
    made: Qwen2ForCausalLM = model.float()
    return made


def near_model() -> Qwen2ForCausalLM:
    """A policy a little away from ``tiny_model(2)``, so that some ratios to it are clipped and most are not."""
    model = tiny_model(2)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    """[P] Whole tensors, one after the other; parts are gathered from the ranks."""
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return torch.cat([one.detach().reshape(-1) for one in whole])


def gradient(model: torch.nn.Module) -> Tensor:
    """[P] of all parameters, end to end, in double precision."""
    return end_to_end(p.grad for p in model.parameters() if p.grad is not None).double()


@torch.no_grad()
def draw(model: torch.nn.Module, sample: Sample, num_tokens: int, version: int, generator: torch.Generator) -> None:
    """Append ``num_tokens`` tokens that the model draws at the job's temperature; eos comes from the caller."""
    temperature = sample.job.sampling["temperature"]
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([sample.tokens])).logits[0, -1].float()
        logprobs = (logits / temperature).log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        sample.append([token], version=version, logprobs=[float(logprobs[token])])


@torch.no_grad()
def finish(model: torch.nn.Module, sample: Sample, version: int) -> None:
    """Append eos with the logprob that the model gives it."""
    logits = model(input_ids=torch.tensor([sample.tokens])).logits[0, -1].float()
    logprob = (logits / sample.job.sampling["temperature"]).log_softmax(-1)[EOS]
    sample.append([EOS], version=version, logprobs=[float(logprob)])


def make_samples(
    models: dict[int, torch.nn.Module], *, groups: int = 3, n: int = 4, temperature: float = 1.0, seed: int = 0
) -> list[Sample]:
    """Groups of answers of uneven length that end with eos; each spans all ``models``, oldest version first."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for group in range(groups):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(2, 6))]
        job = Job(f"toy/0/{group}", n, prompt_ids=prompt, sampling={"temperature": temperature})
        for k in range(n):
            sample = Sample(job, k)
            sample.append(prompt)
            sample.prompt_length = len(prompt)
            for version in sorted(models):
                draw(models[version], sample, rng.randrange(2, 7), version, generator)
            finish(models[max(models)], sample, max(models))
            # Groups differ in level and spread, so that mixing them up is seen.
            sample.reward = group * 5 + rng.random() * (group + 1)
            sample.status, sample.finish_reason = "completed", "stop"
            samples.append(sample)
    return samples


def make_row(sample: Sample, data: bytes, *, mask_below: int = -1, **changes: Any) -> Row:
    """The row of a manifest for a sample, as a cut would write it."""
    _, (meta,) = payloads.pack([sample], token="token", server="control")
    payload = payloads.decode(data, sample.id)
    counts = {version: int(payload.loss_mask[start:end].sum()) for start, end, version in payload.spans}
    loss = [(version, count) for version, count in counts.items() if count and version >= mask_below]
    values: dict[str, Any] = {
        "job": sample.job.id,
        "k": sample.k,
        "token": meta.token,
        "server": meta.server,
        "checksum": payloads.checksum_of(data),
        "num_bytes": meta.num_bytes,
        "length": meta.length,
        "prompt_length": meta.prompt_length,
        "num_generated": meta.num_generated,
        "num_loss": sum(count for _, count in loss),
        "oldest": meta.oldest,
        "newest": meta.newest,
        "oldest_loss": min((version for version, _ in loss), default=-1),
        "reward": meta.reward,
        "status": meta.status,
        "temperature": meta.temperature,
        "logprob_kind": meta.logprob_kind,
        "num_unproven": meta.num_unproven,
        "masked": not meta.num_loss,
        "loss_versions": [list(pair) for pair in loss] if len(loss) > 1 else [],
    }
    return Row(**(values | changes))


def make_manifest(rows: Sequence[Row], **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "sub": "actor",
        "n": 1,
        "train_version": 6,
        "bound": 4,
        "on_expiry": "mask",
        "mode": "async",
        "mask_below": -1,
        "rows": list(rows),
        "num_loss_tokens": sum(row.num_loss for row in rows),
        "num_samples": len(rows),
        "num_groups": len({row.job for row in rows}),
        "num_first_use": len({row.job for row in rows}),
        "staleness_max": 2,
        "staleness_mean": 1.0,
    }
    return Manifest(**(values | changes))


def make_batch(
    samples: Sequence[Sample],
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    row_changes: dict[int, Any] | None = None,
    store: Any = None,
    advantage: advantages.Kind = "grpo",
    read_sides: Any = None,
    **changes: Any,
) -> Batch:
    """One rank's share of a batch of ``samples``; ``row_changes`` falsifies rows by index."""
    data = {sample.id: payloads.encode(sample) for sample in samples}
    mask_below = changes.get("mask_below", -1)
    rows = [
        make_row(sample, data[sample.id], mask_below=mask_below, **(row_changes or {}).get(i, {}))
        for i, sample in enumerate(samples)
    ]
    manifest = make_manifest(rows, **changes)
    return Batch(
        manifest,
        digest=Manifest.digest(manifest.to_bytes()),
        payloads=dict(data),
        dp_rank=dp_rank,
        dp_size=dp_size,
        store=store,
        advantage=advantage,
        read_sides=read_sides,
    )


def with_beside(samples: Sequence[Sample], name: str, values: Mapping[str, Any], **changes: Any) -> Batch:
    """A batch whose samples have a side array (sample id -> array)."""
    return with_sides(samples, {sample: {name: array} for sample, array in values.items()}, **changes)


def with_sides(samples: Sequence[Sample], values: Mapping[str, Mapping[str, Any]], **changes: Any) -> Batch:
    """A batch whose samples have side arrays (sample id -> name -> array) in keys of their own."""
    packed = {
        (sample, name): sides.pack(name, array, sample) for sample, of in values.items() for name, array in of.items()
    }
    named: dict[str, list[Any]] = {}
    for (sample, name), data in packed.items():
        named.setdefault(sample, []).append([name, len(data), payloads.checksum_of(data)])
    changed = changes.pop("row_changes", {})

    def read(rows: Sequence[Row], wanted: str) -> dict[str, bytes | None]:
        return {row.sample: packed[row.sample, wanted] for row in rows if (row.sample, wanted) in packed}

    merged = {i: {"sides": named.get(one.id, [])} | changed.get(i, {}) for i, one in enumerate(samples)}
    return make_batch(samples, row_changes=merged, read_sides=read, **changes)


def logprobs_of(model: torch.nn.Module, tokens: Sequence[int], temperature: float) -> Tensor:
    """[L] log-probability of each token given those before it, one plain pass without padding; 0 for the first."""
    ids = torch.tensor([list(tokens)])
    table = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
    rest = torch.stack([table[t - 1, ids[0, t]] for t in range(1, len(tokens))])
    return torch.cat([torch.zeros(1, dtype=torch.float64), rest])
