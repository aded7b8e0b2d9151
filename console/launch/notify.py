"""Tells a web address of one's own that a run has ended: finished, failed or stopped (``notify.url``).

It never holds up the end of a run for longer than ``notify.timeout_s``; what goes wrong with it is told, and no more.
Redirects are refused: the address that was given is the one that hears of the run. Secrets are masked in what is sent.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.config.net.watching import NotifyConfig
from penstock.errors import ConfigError
from penstock.redaction import MASK, redact
from penstock.system.extras import check_installed
from penstock.system.run_folder import RunRecord

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

#: Pause before the second try; doubles.
PAUSE_S = 0.5
#: Most characters of a reason that are sent.
MAX_REASON = 4_000


def check_notify(config: Config) -> None:
    """Refuse a resolved configuration that only shows that there was an address. Raises ConfigError."""
    if config.notify.url == MASK:
        raise ConfigError(
            "notify.url is masked in this file: give it again, as PENSTOCK_NOTIFY__URL or --notify.url=URL, or "
            "--notify.url=null to have nobody told."
        )
    if config.notify.url is not None:
        check_installed("aiohttp", "notify.url")


def message(config: Config, record: RunRecord, summary: dict[str, Any]) -> dict[str, Any]:
    """What is sent of a run's end, secrets masked."""
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
    """Post ``body``. Blocks for ``timeout_s`` at most; what goes wrong is logged, without the address."""
    if config.url is None:
        return
    # In a thread that is left behind: a resolver that hangs cannot be ended.
    failures: list[str] = []
    thread = threading.Thread(target=_run, args=(config, config.url, body, failures), name="notify", daemon=True)
    thread.start()
    thread.join(config.timeout_s)
    if thread.is_alive():
        failures.append(f"it did not answer in notify.timeout_s = {config.timeout_s:g}")
    if failures:
        log.warning("notify.url was not told of the end of the run: %s", redact(failures[-1]))


def _run(config: NotifyConfig, url: str, body: dict[str, Any], failures: list[str]) -> None:
    try:
        if failure := asyncio.run(_post_until(config, url, json.dumps(body).encode())):
            failures.append(failure)
    except Exception as exc:
        # Of a library: whatever it is, the run has ended and its end is told.
        failures.append(f"{type(exc).__name__}: {exc}")


async def _post_until(config: NotifyConfig, url: str, data: bytes) -> str:
    """Post until it is taken; '' or why it was not."""
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
    """One try: why it failed, or '', and whether another one may help."""
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
