"""A real Prometheus on loopback, that scrapes what a run's file of targets names."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from penstock.system.processes import free_port
from tests.missing import lack

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "console" / "monitoring"
#: Where `make prometheus` unpacks the package.
UNPACKED = ROOT / ".prometheus" / "usr" / "bin"
#: A window of a query, in minutes.
_SPAN = re.compile(r"\[(\d+)m\]")
#: Longest wait for any one thing to happen.
PATIENCE_S = 200.0


def program(name: str) -> str:
    """Path of ``prometheus`` or ``promtool``; skip, or fail in CI, where it is not there."""
    found = shutil.which(name) or shutil.which(name, path=UNPACKED)
    return found or lack(f"{name} is missing: run make prometheus, or install Debian's package prometheus")


class Prometheus:
    """What one server knows."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **options: str) -> Any:
        """``data`` of an answer of its API; AssertionError where it is none."""
        with urlopen(f"{self._url}/api/v1/{path}?{urlencode(options)}", timeout=30) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Samples of an instant query, each with ``metric`` and ``value``."""
        found = self.ask("query", query=expr)["result"]
        assert isinstance(found, list)
        return found

    def value(self, expr: str) -> float:
        """The largest of its values; -1 where there is none."""
        return max((float(one["value"][1]) for one in self.query(expr)), default=-1.0)

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {one["labels"]["alertname"] for one in self.ask("alerts")["alerts"] if one["state"] == "firing"}

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


def quick_rules(times: int = 20) -> dict[str, Any]:
    """The product's alerts, each span of time so many times shorter, by names that begin with Quick.

    The real spans are tried by promtool; in a run that is to see an alert stop, too, they would take a quarter of an
    hour.
    """
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["alert"] = f"Quick{rule['alert'].removeprefix('Penstock')}"
        rule["expr"] = _SPAN.sub(lambda span: f"[{60 * int(span[1]) // times}s]", rule["expr"])
        rule["for"] = f"{60 * int(rule.get('for', '0m').removesuffix('m')) // times}s"
    return {"groups": [{**group, "name": "quick"} for group in rules["groups"]]}


@contextmanager
def scraping(folder: Path, targets: Path) -> Iterator[Prometheus]:
    """Prometheus with the rules of the product, and with ``quick_rules``, every second."""
    port = free_port()
    (folder / "quick.yml").write_text(yaml.safe_dump(quick_rules()))
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(MONITORING / "alerts.yml"), str(folder / "quick.yml")],
                "scrape_configs": [
                    {"job_name": "p", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
                ],
            }
        )
    )
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        server = Prometheus(port)
        wait(server.is_ready, lambda: (folder / "prometheus.log").read_text())
        yield server
    finally:
        process.kill()
        process.wait()


def wait(condition: Callable[[], bool], instead: Callable[[], object]) -> None:
    """Poll until it is true; fails the test after ``PATIENCE_S`` with what there is instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s: {instead()}"
        time.sleep(0.2)
