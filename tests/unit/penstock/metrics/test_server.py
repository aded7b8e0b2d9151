"""The server of one part's metrics: where it is, and what it says where a server does not answer."""

from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.errors import ConfigError, QueueUnavailable
from penstock.metrics.series import gauge
from penstock.metrics.server import MetricsServer, serve

THERE = gauge("there", "It is there.")


class There(Collector):
    def collect(self) -> Iterator[Metric]:
        yield THERE.of(7)


class Away(Collector):
    def collect(self) -> Iterator[Metric]:
        yield THERE.of(8)
        raise QueueUnavailable("Redis does not answer.")


def config(tmp_path: Path, **metrics: object) -> Config:
    data = {"train": [{"name": "d", "path": str(tmp_path / "d.jsonl")}]}
    return Config.model_validate({"run": "r", "model": {"path": "m"}, "data": data, "metrics": metrics})


def served(tmp_path: Path, *collectors: Collector) -> str:
    server = serve(config(tmp_path, port=0), "worker", "w-1", *collectors)
    assert server is not None
    try:
        with urlopen(server.url, timeout=60) as answer:
            return str(answer.read().decode())
    finally:
        server.close()


def test_a_part_says_who_it_is_and_what_its_collectors_say(tmp_path: Path) -> None:
    lines = served(tmp_path, There()).splitlines()

    assert "penstock_there 7.0" in lines
    assert any(line.startswith('penstock_part_info{name="w-1",part="worker",run="r",version=') for line in lines)
    assert "penstock_part_failed_scrapes_total 0.0" in lines


def test_figures_that_a_server_does_not_give_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = served(tmp_path, Away(), There()).splitlines()

    assert "penstock_there 8.0" not in lines, "half of what a collector says"
    assert "penstock_there 7.0" in lines
    assert "penstock_part_failed_scrapes_total 1.0" in lines


def test_nobody_serves_where_nobody_asked(tmp_path: Path) -> None:
    assert serve(config(tmp_path), "worker", "w", There()) is None


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    first = serve(config(tmp_path, port=0), "worker", "w")
    assert first is not None
    port = int(first.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=r"metrics.port \d+ cannot be listened on .*: set an address of"):
        serve(config(tmp_path, port=port), "buffer", "")
    first.close()


@pytest.mark.parametrize(
    ("listens", "reached_at", "host"),
    [("127.0.0.1", "node7", "127.0.0.1"), ("0.0.0.0", "node7", "node7"), ("0.0.0.0", "fd00::7", "[fd00::7]")],
)
def test_a_part_shows_where_it_is_reached(tmp_path: Path, listens: str, reached_at: str, host: str) -> None:
    made = config(tmp_path, port=0, host=listens).model_copy(update={"reached_at": reached_at})
    server = serve(made, "worker", "w")

    assert isinstance(server, MetricsServer)
    server.close()
    assert server.url.startswith(f"http://{host}:")


@pytest.mark.parametrize("host", ["", "a b", "http://a", "a/b", "u@a"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        config(tmp_path, host=host)
