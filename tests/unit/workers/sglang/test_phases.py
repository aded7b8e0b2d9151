"""The phase of a starting server, by lines of SGLang's own logs."""

import pytest

from penstock.records.worker_causes import EngineStarting
from penstock.workers.sglang.server import phase_of

LOG = [
    ("UserWarning: Only CUDA, HIP and XPU support AWQ currently.", "importing its packages"),
    ("[2026-11-23 01:03:39] server_args={'model_path': '/m'}", "starting its processes"),
    ("[2026-11-23 01:03:54] Load weight begin. avail mem=18.79 GB", "loading weights"),
    ("Loading shards:   0% Completed | 0/4 [00:00<?, ?it/s]", "loading weights (0 %)"),
    ("Loading shards:  50% Completed | 2/4 [00:00<?, ?it/s]", "loading weights (50 %)"),
    ("Loading shards: 100% Completed | 4/4 [00:00<?, ?it/s]", "loading weights"),
    ("[2026-11-23 01:03:54] Load weight end. elapsed=0.03 s", "allocating the KV cache"),
    ("[2026-11-23 01:03:54] Memory pool end. avail mem=18.71 GB", "preparing to serve"),
    ("[2026-11-23 01:03:55] Capture cuda graph begin. This can take up to several minutes.", "capturing CUDA graphs"),
    ("Capturing batches (bs=8 avail_mem=17.2 GB):  25%|##5       | 1/4", "capturing CUDA graphs (25 %)"),
    ("[2026-11-23 01:03:56] Capture cuda graph end. Time elapsed: 1.2 s.", "preparing to serve"),
    ("[2026-11-23 01:03:57] INFO:     Started server process [16424]", "opening its port"),
]


@pytest.mark.parametrize("count", range(1, len(LOG) + 1), ids=[phase for _, phase in LOG])
def test_the_last_line_that_begins_a_phase_says_which(count: int) -> None:
    assert phase_of("\n".join(line for line, _ in LOG[:count])).progress == LOG[count - 1][1]


def test_a_server_that_has_written_nothing_is_importing() -> None:
    assert phase_of("") == EngineStarting("imports")
