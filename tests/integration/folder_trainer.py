"""A trainer that publishes version 1, folder first, and stands still (SIGSTOP) at a named point of it.

python -m tests.integration.folder_trainer CONFIG.json POINT
"""

import json
import os
import signal
import sys
from pathlib import Path

from penstock.config import Config
from penstock.consumers.clock import Clock
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights import write as files
from penstock.errors import PublishError
from tests.integration.parts import publish

#: Point -> what is called right behind it.
POINTS: dict[str, tuple[object, str]] = {"proven": (Clock, "claim"), "claimed": (files, "_put_in_place")}


def main(path: str, point: str) -> None:
    config = Config.model_validate(json.loads(Path(path).read_text()))
    owner, name = POINTS[point]
    real, stops = getattr(owner, name), [point]

    def stop_there(*args: object) -> object:
        if stops:
            stops.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args)

    setattr(owner, name, stop_there)
    with Trainer(config) as trainer:
        try:
            publish(trainer, 1)
        except PublishError as exc:
            print(exc, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
