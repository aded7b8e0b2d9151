"""How a rank of the reference trainer ends."""

import logging

import pytest
import torch.distributed as dist

from penstock.config import Config
from penstock.consumers.grpo import main
from penstock.errors import EXIT_CONFIG


def test_a_rank_with_a_transport_that_is_none_ends_as_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it makes a process group, and in a sentence: status 2 is not tried again."""
    monkeypatch.setattr(main, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(main, "set_up", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was made"))
    values = {"run": "x", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    config = Config.model_validate(values | {"trainer": {"transport": "json:loads", "dp_size": 2}})

    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        main._rank_main(1, config, "store")

    assert ended.value.code == EXIT_CONFIG == 2
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.transport json:loads is not a sender: derive its class from penstock.Sender."
    ]
