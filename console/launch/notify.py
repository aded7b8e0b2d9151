"""Post the end of a run to a web address: finished, failed or stopped (``notify.url``).

It never delays the end of a run for longer than ``TIMEOUT_S``; failures are only logged. Redirects are refused,
so that only the configured address gets the message. Secrets are masked in it.
"""

import json
import logging
import socket
import threading
import time
from typing import Any

from penstock.config import Config
from penstock.config.serving import NotifyConfig
from penstock.errors import ConfigError
from penstock.protocol.engine_http import ask
from penstock.system.run_folder import RunRecord
from penstock.text import MASK, redact

log = logging.getLogger(__name__)

#: Seconds before the second attempt; doubles.
PAUSE_S = 0.5
#: Longest time of all attempts together, and the number of attempts.
TIMEOUT_S, ATTEMPTS = 10.0, 3
#: Most characters of a reason that are sent.
MAX_REASON = 4_000


def check_notify(config: Config) -> None:
    """Raise ConfigError for a resolved configuration in which the address is masked."""
    if config.notify.url == MASK:
        raise ConfigError(
            "notify.url is masked in this file: give it again, as PENSTOCK_NOTIFY__URL or --notify.url=URL, or "
            "--notify.url=null to send no notification."
        )


def message(config: Config, record: RunRecord, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the message about a run's end, secrets masked."""
    text = f"penstock: run {config.run} {'has ' if record.state != 'stopped' else 'was '}{record.state}"
    body: dict[str, Any] = _masked(
        {
            "run": config.run,
            "state": record.state,
            "reason": record.reason[:MAX_REASON],
            "text": f"{text}: {record.reason[:MAX_REASON]}" if record.reason else text,
            "host": socket.gethostname(),
            "folder": str(config.run_dir.absolute()),
            "started_s": record.started_s,
            "active_s": record.active_s,
            "ended_s": time.time(),
            "summary": summary,
        }
    )
    return body


def notify(config: NotifyConfig, body: dict[str, Any]) -> None:
    """Post ``body``. Blocks for ``TIMEOUT_S`` at most; failures are logged, without the address."""
    if config.url is None:
        return
    # In a thread that may be abandoned: a resolver that hangs cannot be cancelled.
    failures: list[str] = []
    data = json.dumps(body).encode()
    thread = threading.Thread(target=_post, args=(config.url, data, failures), name="notify", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        failures.append(f"it did not answer in {TIMEOUT_S:g} s")
    if failures:
        log.warning("failed to post the end of the run to notify.url: %s", redact(failures[-1]))


def _post(url: str, data: bytes, failures: list[str]) -> None:
    """Post until the server accepts, or a retry is of no use; add what failed."""
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * 2 ** (attempt - 1) if attempt else 0.0)
        try:
            status = ask(url, data, timeout_s=TIMEOUT_S).status
        except Exception as exc:
            # Any error: the run has ended, and reporting its end must not fail.
            failures.append(str(exc).replace(url, "it"))
            continue
        if 200 <= status < 300:
            failures.clear()
            return
        failures.append(f"it answered {status}")
        if 300 <= status < 400:
            failures.append(f"it answered {status}, and redirects are not followed: set notify.url to where it leads")
        if status < 500 and status not in (408, 429):
            return


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _masked(one) for key, one in value.items()}
    return [_masked(one) for one in value] if isinstance(value, list) else value
