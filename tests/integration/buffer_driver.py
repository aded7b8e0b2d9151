"""A buffer process, or a recorder, that is killed (-9), or frozen, at one named point.

``python -m ... CONFIG.json [before|after|freeze VERB [PART]]``; ``freeze`` stops it (SIGSTOP) right before
the verb is sent.
"""

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.protocol import scripts
from penstock.redis import call as call_module


def die_at(when: str, verb: str) -> None:
    """Kill this process right before, or right after, it sends ``verb`` for the first time; or freeze it before."""
    send = scripts.run
    frozen = False

    def run(client: Any, call: Any) -> Any:
        nonlocal frozen
        if call.script.name == verb and when == "freeze" and not frozen:
            frozen = True
            os.kill(os.getpid(), signal.SIGSTOP)
        if call.script.name == verb and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = send(client, call)
        if call.script.name == verb and when == "after" and answer:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    scripts.run = call_module.run = run


def main() -> None:
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 2:
        die_at(sys.argv[2], sys.argv[3])  # before the parts import the verbs' sender by name
    part = import_module(sys.argv[4] if len(sys.argv) > 4 else "penstock.buffer.main")
    sys.exit(part.main(config))


if __name__ == "__main__":
    main()
