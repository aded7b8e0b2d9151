"""Judges, and a teacher, against a real SGLang: what one gives is what the model gives."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

from penstock.config import ModelConfig
from penstock.config.reward import JudgeConfig, ScoringModelConfig
from penstock.errors import JudgeError
from penstock.model.folder import read_vocab_size
from penstock.workers.rewards.frozen import FrozenModel
from penstock.workers.rewards.judges import Judge
from tests.integration import oracle
from tests.integration.engine_fixtures import cpu_engine, up
from tests.tiny_model import make_tiny_classifier, make_tiny_model

TEXTS = ["2+3=5", "2+3=6", "=", "9" * 200]


async def test_a_judge_gives_what_the_reward_model_gives(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "taste")
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    server = await up(cpu_engine(**{"is-embedding": True}), ModelConfig(path=str(folder), dtype="float32"), tmp_path)
    wanted: list[list[float]] = []
    found: list[list[float]] = []
    judge = Judge(JudgeConfig(name="taste", url=server.url, timeout_s=600, max_attempts=1))
    try:
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            with torch.no_grad():
                wanted.append(model(torch.tensor([ids])).logits[0].tolist())
            found.append(await judge.classify(text))
            assert await judge.classify(ids) == pytest.approx(found[-1], rel=1e-5)
        # SGLang answers 500, as one that is out of order does: it is asked whether it is there, and then once more.
        with pytest.raises(JudgeError, match="judge taste: 2 tries failed, the last with status 500"):
            await judge.classify([])
    finally:
        await judge.close()
        await server.stop()
    # SGLang's kernels for CPU round otherwise than torch.
    spread = torch.tensor(wanted).std().item()
    assert found == [pytest.approx(one, abs=0.01 * spread) for one in wanted], "one number each, of its last token"


async def test_a_judge_says_what_the_model_says(engine_url: str) -> None:
    judge = Judge(JudgeConfig(name="critic", url=engine_url, timeout_s=600))
    try:
        said = await judge.generate("2+3=", max_new_tokens=4, ignore_eos=True)
    finally:
        await judge.close()
    assert len(said) <= 4
    assert isinstance(said, str)


async def test_T6_a_teacher_says_of_each_token_what_its_model_says(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "teacher", seed=3)
    tokens = [2 + (7 * t * t + t) % 43 for t in range(60)]
    table = oracle.load_model(folder)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    server = await up(cpu_engine(), ModelConfig(path=str(folder), dtype="float32"), tmp_path)
    config = ScoringModelConfig(name="big", url=server.url, path=str(folder), timeout_s=600, max_attempts=1)
    teacher = FrozenModel("teacher", config, read_vocab_size(folder))
    try:
        for start in (1, 20, 59):
            found = await teacher.logprobs(tokens, start, "d/0/0/0")
            wanted = [float(table[t - 1, tokens[t]]) for t in range(start, len(tokens))]
            assert found.tolist() == pytest.approx(wanted, abs=1e-3)
    finally:
        await teacher.close()
        await server.stop()
