"""What a trainer says of a version is what workers read, or nothing is written and announced."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.consumers.clock import Clock
from penstock.consumers.weights.publisher import Publisher, _whole
from penstock.errors import ProtocolError, PublishError
from penstock.records.publication import Publication


class Untouched:
    """Whatever is asked of it was too much."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def publisher(tmp_path: Path) -> Publisher:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(name="policy"),
        trainer=SimpleNamespace(weights_dir=str(tmp_path), transport="disk", rank_timeout_s=1.0),
        serving=SimpleNamespace(enabled=False),
    )
    untouched, seat = Untouched(), SimpleNamespace(drives=True, leads=True)
    subscriber: Any = SimpleNamespace(keys=None, control=untouched, waiting=untouched, model="policy", seat=seat)
    clock: Any = SimpleNamespace(must_publish=False)
    return Publisher(config, subscriber, clock, untouched)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1.0, "1", 2**63, -(2**63) - 1, np.float32(1)])
def test_a_step_that_no_worker_could_read_is_refused_before_anything_is_written(tmp_path: Path, step: Any) -> None:
    source: Any = SimpleNamespace(is_sharded=False, tensors=lambda config: iter(()))
    with pytest.raises(PublishError, match="step"):
        publisher(tmp_path).publish(source, step=step, timeout_s=1)
    with pytest.raises(PublishError, match="step"):
        publisher(tmp_path).tick(step=step, timeout_s=1)


def test_steps_of_any_kind_of_integer_are_taken() -> None:
    assert [type(_whole(step)) for step in (0, 5, np.int64(5), True, -1)] == [int] * 5


@pytest.mark.parametrize("field", [{"step": 1.0}, {"through": 2.5}, {"path": None}, {"abandoned": [[1]]}])
def test_what_no_worker_could_read_is_not_announced(field: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": "policy", "version": 1, "transport": "disk", "path": "/x"} | field
    clock = Clock.__new__(Clock)
    clock._subscriber = Untouched()  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match=f"The publication has a field {next(iter(field))}"):
        clock.announce(Publication(**fields))
