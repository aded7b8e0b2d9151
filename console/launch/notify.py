"""Post the end of a run to a web address: finished, failed or stopped (``notify.url``).

It never delays the end of a run for longer than ``notify.timeout_s``; failures are only logged. Redirects are refused,
so that only the configured address gets the message. Secrets are masked in it.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.config.serving import NotifyConfig
from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.system.run_folder import RunRecord
from penstock.text import MASK, redact

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

#: Seconds before the second attempt; doubles.
PAUSE_S = 0.5
#: Most characters of a reason that are sent.
MAX_REASON = 4_000


def check_notify(config: Config) -> None:
    """Raise ConfigError for a resolved configuration in which the address is masked."""
    if config.notify.url == MASK:
        raise ConfigError(
            "notify.url is masked in this file: give it again, as PENSTOCK_NOTIFY__URL or --notify.url=URL, or "
            "--notify.url=null to send no notification."
        )
    if config.notify.url is not None:
        check_installed("aiohttp", "notify.url")


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
    """Post ``body``. Blocks for ``timeout_s`` at most; failures are logged, without the address."""
    if config.url is None:
        return
    # In a thread that may be abandoned: a resolver that hangs cannot be cancelled.
    failures: list[str] = []
    thread = threading.Thread(target=_run, args=(config, config.url, body, failures), name="notify", daemon=True)
    thread.start()
    thread.join(config.timeout_s)
    if thread.is_alive():
        failures.append(f"it did not answer in notify.timeout_s = {config.timeout_s:g}")
    if failures:
        log.warning("failed to post the end of the run to notify.url: %s", redact(failures[-1]))


def _run(config: NotifyConfig, url: str, body: dict[str, Any], failures: list[str]) -> None:
    try:
        if failure := asyncio.run(_post_until(config, url, json.dumps(body).encode())):
            failures.append(failure)
    except Exception as exc:
        # Any error of the library: the run has ended, and reporting its end must not fail.
        failures.append(f"{type(exc).__name__}: {exc}")


async def _post_until(config: NotifyConfig, url: str, data: bytes) -> str:
    """Post until the server accepts; return '' or the error."""
    import aiohttp

    failure, pause_s = "", PAUSE_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False) as session:
        for attempt in range(config.max_attempts):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            failure, again = await _post(session, url, data, config.timeout_s)
            if not again:
                return failure
    return f"{failure} ({config.max_attempts} tries)"


async def _post(session: "aiohttp.ClientSession", url: str, data: bytes, timeout_s: float) -> tuple[str, bool]:
    """Post once; return the error, or '', and whether a retry may help."""
    import aiohttp

    headers = {"Content-Type": "application/json", "User-Agent": "penstock"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(url, data=data, headers=headers, allow_redirects=False) as answer,
        ):
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        return f"{type(exc).__name__}: {exc}", True
    if 200 <= status < 300:
        return "", False
    if 300 <= status < 400:
        return f"it answered {status}, and redirects are not followed: set notify.url to where it leads", False
    return f"it answered {status}", status >= 500 or status in (408, 429)


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: _masked(one) for key, one in value.items()}
    return [_masked(one) for one in value] if isinstance(value, list) else value
