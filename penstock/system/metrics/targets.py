"""Addresses of a run's metrics for Prometheus: its file-based service discovery.

Processes come and go, each with its own port; the file is made from their presence records in Redis.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.protocol.keys import Keys
from penstock.protocol.presence import GONE_S, parse_workers
from penstock.protocol.snapshot import present_parts
from penstock.redis.commands import Client
from penstock.system.disk import put

#: A valid address: writers in Redis must not make Prometheus request anything else.
_URL = re.compile(r"http://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})/metrics")
#: Most processes in the list.
MAX_TARGETS = 10_000

Group = dict[str, Any]


def targets(client: Client, keys: Keys) -> list[Group]:
    """Return groups of Prometheus' file_sd format, one for each running process with metrics, by address.

    Labels are ``run``, ``part`` (worker, buffer, producer, trainer, scorer, verifiers, fleet, recorder, launcher) and
    ``name``. Blocks for one round trip; raises redis' errors.
    """
    pipe = client.pipeline(transaction=False)
    pipe.hgetall(keys.workers)
    pipe.hgetall(keys.parts)
    workers, parts = pipe.execute()
    found = [("worker", one.started_as, one.metrics) for one in parse_workers(workers) if one.age_s < GONE_S]
    shown = [one for one in present_parts(parts) if one["age_s"] < GONE_S]
    found += [(one["part"], one.get("name", ""), one.get("metrics", "")) for one in shown]
    return list(_groups(keys.run, sorted(set(found), key=lambda one: one[::-1])[:MAX_TARGETS]))


def _groups(run: str, found: list[tuple[str, str, str]]) -> Iterator[Group]:
    for part, name, url in found:
        if (address := _URL.fullmatch(url)) and 0 < int(address[2]) < 65536:
            yield {"targets": [f"{address[1]}:{address[2]}"], "labels": {"run": run, "part": part, "name": name}}


def write_targets(path: Path, groups: list[Group]) -> bool:
    """Replace the file if it differs; return whether it did. Blocks; raises OSError.

    Readable by all: Prometheus is another user, and it holds no secrets.
    """
    text = json.dumps(groups, indent=1) + "\n"
    if path.is_file() and path.read_text(errors="replace") == text:
        return False
    put(path, text, mode=0o644)
    return True
