"""Servers that penstock did not start, and what they must not be."""

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.workers.sglang.engine import check_external

URL = "http://me:secret@10.0.0.1:30000"
QWEN = {"architectures": ["Qwen2ForCausalLM"]}


def test_another_host_path_and_parallelism_are_fine() -> None:
    info = {"version": "0.5.20", "tp_size": 8, "base_gpu_id": 4, "host": "0.0.0.0", "preferred_sampling_params": None}
    info |= {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
    served = QWEN | {"model_path": "/elsewhere", "is_generation": True}
    check_external(URL, info, served, QWEN)
    check_external(URL, info, {}, {})


@pytest.mark.parametrize(
    ("info", "served", "says"),
    [
        ({}, {"architectures": ["LlamaForCausalLM"], "model_path": "/l"}, "serves LlamaForCausalLM from /l, but model"),
        ({}, QWEN | {"is_generation": False}, "does not generate"),
        ({"skip_tokenizer_init": True}, QWEN, "skip-tokenizer-init enabled and cannot see stop strings"),
        ({"allow_auto_truncate": True}, QWEN, "truncated prompts"),
        (
            {"preferred_sampling_params": {"temperature": 0.5}},
            QWEN,
            "preferred-sampling-params enabled and would not sample",
        ),
        ({}, QWEN | {"preferred_sampling_params": '{"temperature": 0.5}'}, "has preferred-sampling-params"),
        ({"speculative_accept_threshold_acc": 0.9}, QWEN, "speculative-accept-threshold-acc 0.9 accepts draft tokens"),
    ],
)
def test_what_cannot_serve_this_run_is_refused(info: dict[str, Any], served: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_external(URL, info, served, QWEN)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)
