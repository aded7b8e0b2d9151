"""A member of a transfer that is no engine: it enrolls, joins and receives as a worker with its engine does.

Run as a process of its own, which may die (SIGKILL) or freeze (SIGSTOP) at a given bucket. What it received, as
checksums by name, it leaves in ``received:NAME`` of the run.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from xxhash import xxh3_64_intdigest

from penstock.protocol import scripts, transfers
from penstock.protocol.scripts import run
from penstock.protocol.transfers import Decision, Enrollment
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.weights.index import in_buckets, read_index


def show(client, keys: Keys, name: str) -> None:  # type: ignore[no-untyped-def]
    record = {"name": name, "at": time.time() + 3600, "state": "serving", "ranks": 1, "version": 0, "offloaded": []}
    run(client, scripts.note(keys, keys.workers, name, pack(record)))


def main(url: str, run_name: str, name: str, versions: int, stop_at: int, how: int) -> None:
    client, keys = connect(url), Keys(run_name)
    newest = client.xrevrange(keys.weights("policy"), count=1)
    group, last, seen, after = None, "", newest[0][0] if newest else b"0-0", b"0-0"
    show(client, keys, name)
    for _ in range(versions):
        found: list = []
        while not found:
            found = client.xread({keys.weights("policy"): seen}, block=500, count=1)
        seen, fields = found[0][1][0]
        publication = Publication.from_bytes(fields[b"p"])
        id_ = publication.id
        enrollment = Enrollment(name, "http://127.0.0.1:1", 1, last)
        assert run(client, transfers.enroll(keys, "policy", id_, enrollment))
        decision = None
        while decision is None or decision.id != id_:
            for entry, said in (client.xread({keys.transfers("policy"): after}, block=500) or [(b"", [])])[0][1]:
                after, decision = entry, Decision.from_bytes(said[b"d"])
        if decision.group != last:
            last = decision.group
            store = TCPStore(decision.address, decision.port, is_master=False, timeout=timedelta(seconds=60))
            chain = PrefixStore("cpu/", PrefixStore(f"{last}/", PrefixStore(last, store)))
            rank, limit = decision.ranks[name], timedelta(seconds=60)
            group = dist.ProcessGroupGloo(chain, rank, decision.world_size, timeout=limit)
        index = read_index(Path(publication.path), publication.index)
        received = {}
        for number, bucket in enumerate(in_buckets(index.entries(), decision.bucket_bytes), start=1):
            if number == stop_at:
                os.kill(os.getpid(), how)
            flat = torch.zeros(sum(entry.num_bytes for entry in bucket), dtype=torch.uint8)
            assert group is not None
            group.broadcast(flat, 0).wait()
            start = 0
            for entry in bucket:
                received[entry.name] = xxh3_64_intdigest(flat[start : start + entry.num_bytes].numpy().tobytes())
                start += entry.num_bytes
        client.set(keys.of(f"received:{name}:{publication.version}"), json.dumps(received))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), getattr(signal, sys.argv[6]))
