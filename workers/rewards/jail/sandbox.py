"""A remote sandbox: programs of answers run at a service with SandboxFusion's API (``POST /run_code``).

The service isolates them. It gets the program and a test's input; results are compared here, as with a jail.
"""

import json
import math
import time
import urllib.error
import urllib.request
from typing import Any

from penstock.text import format_exc, redact, safe_repr
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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse: programs go to the configured address alone."""


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
        self._opener = urllib.request.build_opener(_NoRedirects)

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
        data, pause_s = json.dumps(body).encode(), _PAUSE_S
        for attempt in range(_ATTEMPTS):
            try:
                return self._ended(self._post(data, limit_s))
            except (OSError, _Busy) as exc:  # URLError is one
                if attempt == _ATTEMPTS - 1:
                    raise JailError(f"the sandbox at {redact(self._url)} does not answer: {format_exc(exc)}") from exc
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError

    def _post(self, data: bytes, limit_s: float) -> bytes:
        request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=limit_s + _START_S + _ANSWER_S) as response:
                answer: bytes = response.read(self._most + 1)
        except urllib.error.HTTPError as exc:
            with exc:
                if exc.code < 500 and exc.code not in (408, 429):
                    raise JailError(f"the sandbox at {redact(self._url)} refuses programs: status {exc.code}") from exc
                raise _Busy(f"status {exc.code}") from exc
        return answer

    def _ended(self, data: bytes) -> Ended:
        if len(data) > self._most:
            return Ended(End.TOO_MUCH_OUTPUT, 0, b"", "", 0.0)
        try:
            answer = json.loads(data)
        except ValueError as exc:
            raise JailError(f"the sandbox at {redact(self._url)} did not answer with JSON") from exc
        found = answer.get("run_result") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            why = answer.get("message") if isinstance(answer, dict) else answer
            raise _Busy(f"no program was run: {safe_repr(why)}")
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


class _Busy(Exception):
    """The service did not run the program, and may run it later."""
