"""Has token sequences scored, on and on, and notes what it was told.

python -m tests.chaos.parts.scorer --config FILE
"""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

from penstock import Scorer
from penstock.errors import WaitTimeout
from tests.chaos.parts import law
from tests.chaos.recording.recorder import Recorder

#: Sequences of a call, their length, and how long it waits for them.
SEQUENCES, LENGTH, PATIENCE_S = 4, 12, 20.0
#: Between two calls.
PAUSE_S = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.parts.scorer")
    parser.add_argument("--config", required=True)
    config = parser.parse_args().config
    recorder = Recorder(Path(os.environ["CHAOS_HISTORY"]), "told-scorer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    rng = random.Random(os.getpid())
    call = 0
    with Scorer(config) as scorer:
        while True:
            time.sleep(PAUSE_S)
            call += 1
            sequences = [[rng.randrange(2, law.VOCABULARY) for _ in range(LENGTH)] for _ in range(SEQUENCES)]
            starts = [rng.randrange(1, LENGTH) for _ in sequences]
            try:
                scores = scorer.score(sequences, starts, timeout_s=PATIENCE_S)
            except WaitTimeout as exc:
                print(exc, flush=True)
                continue
            for number, (tokens, start, score) in enumerate(zip(sequences, starts, scores, strict=True)):
                if score.version < 1:
                    continue
                versions = [-1] * start + [score.version] * (LENGTH - start)
                logprobs = [0.0] * start + score.logprobs.tolist()
                named = {"sample": f"{scorer.name}/{call}/{number}", "tokens": tokens}
                recorder.note("told", named | {"versions": versions, "logprobs": logprobs})


if __name__ == "__main__":
    sys.exit(main())
