"""A remote sandbox: programs of answers run at a service with SandboxFusion's API (``POST /run_code``).

The service isolates them. It gets the program and a test's input; results are compared here, as with a jail.
"""

import json
import math
import time

from penstock.errors import EngineError
from penstock.protocol.engine_http import Answer, AnswerTooLarge, ask
from penstock.text import redact, safe_repr
from penstock.workers.rewards.jail.jail import JailError
from penstock.workers.rewards.jail.task import RUNNER, End, Ended, Limits, Task, to_stdin

#: Attempts while the service is busy or unreachable, and the pause before the second; it doubles.
_ATTEMPTS, _PAUSE_S = 4, 0.5
#: Time beside the program's own: to start it, and for the answer to arrive.
_START_S, _ANSWER_S = 2.0, 30.0
#: Most bytes of JSON for a byte of output.
_ESCAPES = 6
#: Statuses of a run.
_FINISHED, _OUT_OF_TIME = "Finished", "TimeLimitExceeded"
#: First line of the runner's errors.
_READY = "ready\n"


class Sandbox:
    """Run programs at ``url``. Safe to share by threads.

    Args:
        url: of the service, without ``/run_code``.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._limits = limits
        #: Most bytes of an answer.
        self._most = _ESCAPES * limits.output_bytes + 64 * 1024

    def describe(self) -> str:
        """Return where programs run, for people."""
        return f"sandbox: the service at {redact(self._url)}"

    def run(self, task: Task, *, test_s: float | None = None) -> Ended:
        """Run a program and return how it ended. Blocks for its time, and while the service is busy.

        Args:
            test_s: time left for it; the limit of a test holds too.

        Raises:
            JailError: the service cannot run it.
        """
        limit_s = min(self._limits.test_s, math.inf if test_s is None else test_s)
        body = {
            "code": RUNNER,
            "language": "python",
            "stdin": to_stdin(task, {}, None).decode(errors="replace"),
            "run_timeout": limit_s + _START_S,
            "memory_limit_MB": self._limits.memory_bytes // 2**20,
        }
        data, timeout_s = json.dumps(body).encode(), limit_s + _START_S + _ANSWER_S
        for attempt in range(_ATTEMPTS):
            try:
                return self._ended(ask(self._url, data, timeout_s=timeout_s, max_bytes=self._most))
            except AnswerTooLarge:
                return Ended(End.TOO_MUCH_OUTPUT, 0, b"", "", 0.0)
            except EngineError as exc:
                if attempt == _ATTEMPTS - 1:
                    raise JailError(f"the sandbox at {redact(self._url)} does not answer: {redact(str(exc))}") from exc
            time.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError

    def _ended(self, answered: Answer) -> Ended:
        """Return how the program ended. Raises EngineError if the service may run it later."""
        status, data = answered.status, answered.body
        if status >= 500 or status in (408, 429):
            raise EngineError(f"status {status}")
        if status != 200:
            raise JailError(f"the sandbox at {redact(self._url)} refuses programs: status {status}")
        try:
            answer = json.loads(data)
        except ValueError as exc:
            raise JailError(f"the sandbox at {redact(self._url)} did not answer with JSON") from exc
        found = answer.get("run_result") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            why = answer.get("message") if isinstance(answer, dict) else answer
            raise EngineError(f"no program was run: {safe_repr(why)}")
        output, errors = (str(found.get(name) or "") for name in ("stdout", "stderr"))
        code, took_s = found.get("return_code"), found.get("execution_time")
        code = code if isinstance(code, int) else 0
        took_s = float(took_s) if isinstance(took_s, int | float) else 0.0
        printed = output.encode(errors="surrogatepass")
        if found.get("status") == _OUT_OF_TIME:
            how = End.OUT_OF_TIME
        elif len(printed) > self._limits.output_bytes:
            how = End.TOO_MUCH_OUTPUT
        elif code < 0 or code >= 128:
            how = End.KILLED
        else:
            how = End.DONE if code == 0 and found.get("status") == _FINISHED else End.FAILED
        return Ended(how, code, printed[: self._limits.output_bytes], errors.removeprefix(_READY), took_s)
