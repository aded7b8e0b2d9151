"""A buffer process that is killed (-9) at one named point: ``python -m ... CONFIG.json [before|after VERB]``."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock import scripts
from penstock.config import Config


def die_at(when: str, verb: str) -> None:
    """Kill this process right before, or right after, it sends ``verb`` for the first time."""
    send = scripts.run

    def run(client: Any, call: Any) -> Any:
        if call.script.name == verb and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = send(client, call)
        if call.script.name == verb and when == "after" and answer:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    scripts.run = run


def main() -> None:
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 2:
        die_at(sys.argv[2], sys.argv[3])  # before the parts import the verbs' sender by name
    from buffer.main import main as run_buffer

    sys.exit(run_buffer(config))


if __name__ == "__main__":
    main()
