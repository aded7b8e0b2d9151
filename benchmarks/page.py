"""How long one waits for the page, of a run of 10^5 samples and 10^3 workers.

A history of 10^5 rows, a fifth of them evaluations; steps, evaluations and seconds of a run of 1,000 steps; a real
Redis with 10^3 workers that show themselves, 10^4 jobs and 200 publications. ``penstock web`` is a process of its own
on a folder with that run.

    answer   of a path over HTTP: the slowest of several, each so long after the one before that nothing is kept
    view     in Chromium: from the click on the view's name until it is filled, caches of the browser empty. All views
             but Trace, which begins with a question
    page     in Chromium: from the click on *More* until the rows are there

``busy_ms`` is the processor time that the server took for an answer, a mean, in steps of 10 ms over the rounds: on a
machine that others use it says more than the clock. ``load`` is the machine's load average when all was measured.

    python -m benchmarks.page --json FILE
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import redis
import typer

from benchmarks.common import Report, execute, redis_server, versions
from benchmarks.page_run import RUN, fill, lay_out, renew
from penstock.console.web.lists import KEPT_S
from penstock.console.web.replies import EVERY_S
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.connect import connect
from penstock.redis.server import write_address

ROUNDS = 5
#: Longest that a first view and a further page may take.
VIEW_MS, PAGE_MS = 1000, 200
PATIENCE_MS = 60_000

PATHS = {
    "runs": "/api/runs",
    "overview": "overview",
    "newest answers": "newest",
    "curves": "curves",
    "lanes": "lists/lanes",
    "jobs": "lists/jobs",
    "jobs, the oldest version first": "lists/jobs?sort=version",
    "workers": "lists/workers?sort=name",
    "workers of a state": "lists/workers?where=state=serving",
    "publications": "lists/weights?sort=-version",
    "samples, the newest": "samples",
    "samples, the best": "samples?sort=reward",
    "samples of a batch": "samples?batch=100&sort=-reward",
    "samples with a word": "samples?text=w17",
    "evaluations": "evals",
    "evaluation by category": "categories?dataset=heldout",
    "prompts over versions": "prompts?dataset=heldout",
    "one prompt over versions": "answers?dataset=heldout&line=7",
    "a sample": "sample?id=math/0/99/3",
    "configuration": "settings",
}
#: View -> what is there once it is filled.
VIEWS = {
    "Overview": ".answers li",
    "Curves": ".chart path",
    "Queue": "[aria-label=Jobs] tbody tr",
    "Samples": "[aria-label=Samples] tbody tr",
    "Evaluation": ".cell",
    "Fleet": "[aria-label=Workers] tbody tr",
    "Weights": "[aria-label=Publications] tbody tr",
    "Configuration": "[aria-label=Configuration] tbody tr",
}
#: Views with *More*, and their rows.
PAGED = {name: VIEWS[name] for name in ("Queue", "Samples", "Fleet", "Weights")}


def main(
    samples: Annotated[int, typer.Option(help="Rows of the history.")] = 100_000,
    workers: Annotated[int, typer.Option(help="Workers that show themselves.")] = 1_000,
    folder: Annotated[
        Path | None, typer.Option(help="Where the run is laid out, or was; a temporary one when not given.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="In Chromium too.")] = True,
    json: Annotated[Path | None, typer.Option(help="File for the result.")] = None,
) -> None:
    """Lay out a run, serve its page, and look at it."""
    report = Report(
        f"the page of {samples:,} samples and {workers:,} workers",
        {"what": "what", "kind": "kind", "ms": "slowest ms", "median_ms": "median ms", "busy_ms": "busy ms"},
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as made, redis_server() as url:
        folder = (folder or Path(made)) / RUN
        client, keys = connect(url), Keys(RUN)
        began = time.monotonic()
        if not folder.is_dir():
            lay_out(folder, samples)
        with redis.Redis.from_url(url) as raw:
            fill(client, raw, keys, workers)
        write_address(folder, url)
        report.versions = versions(client)
        report.keys["laid_out_s"] = round(time.monotonic() - began, 1)
        with _served(folder.parent) as (address, pid):
            _ask_all(report, address, pid, client, keys, workers)
            if browser:
                _look_at_all(report, address, client, keys, workers)
    report.keys["view_ms_max"] = max((one["ms"] for one in report.rows if one["kind"] == "view"), default=None)
    report.keys["page_ms_max"] = max((one["ms"] for one in report.rows if one["kind"] == "page"), default=None)
    report.keys["load"] = round(os.getloadavg()[0], 1)
    report.notes.append(f"a view may take {VIEW_MS} ms, a further page {PAGE_MS} ms: {_verdict(report)}")
    report.finish(json)


def _verdict(report: Report) -> str:
    """Which of them took longer; what was not measured is said as well."""
    over = [
        f"{one['what']} took {one['ms']:.0f}"
        for one in report.rows
        if one["ms"] > {"view": VIEW_MS, "page": PAGE_MS}.get(one["kind"], float("inf"))
    ]
    looked = any(one["kind"] == "view" for one in report.rows)
    return "; ".join(over) or ("none took longer" if looked else "not measured without a browser")


@contextlib.contextmanager
def _served(directory: Path) -> Iterator[tuple[str, int]]:
    """Its address, and its process."""
    command = [sys.executable, "-m", "penstock.cli", "web", "--port", "0", "--directory", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0], process.pid
        finally:
            process.terminate()


def _ask_all(report: Report, address: str, pid: int, client: Client, keys: Keys, workers: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in PATHS}
    busy = dict.fromkeys(PATHS, 0.0)
    sizes: dict[str, int] = {}
    for _ in range(ROUNDS):
        renew(client, keys, workers)
        for name, path in PATHS.items():
            before = _busy_s(pid)
            took, sizes[name] = _ask(address, path)
            times[name].append(took)
            busy[name] += _busy_s(pid) - before
        time.sleep(max(KEPT_S, EVERY_S) + 0.1)
    for name in PATHS:
        mean = round(1000 * busy[name] / ROUNDS, 1)
        report.rows.append(_told(name, "answer", times[name]) | {"busy_ms": mean, "bytes": sizes[name]})


def _busy_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(address: str, path: str) -> tuple[float, int]:
    url = address + (path if path.startswith("/") else f"/api/runs/{RUN}/{path}")
    began = time.monotonic()
    try:
        with urllib.request.urlopen(urllib.parse.quote(url, safe=":/?&=-"), timeout=60) as answer:
            size = len(answer.read())
    except urllib.error.HTTPError as exc:
        raise SystemExit(f"{url}: {exc.read().decode()}") from exc
    return time.monotonic() - began, size


def _look_at_all(report: Report, address: str, client: Client, keys: Keys, workers: int) -> None:
    from playwright.sync_api import sync_playwright

    found: dict[tuple[str, str], list[float]] = {}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(ROUNDS):
            renew(client, keys, workers)
            context = chromium.new_context(viewport={"width": 1360, "height": 900})
            tab = context.new_page()
            tab.set_default_timeout(PATIENCE_MS)
            for kind, name, took in _looked(tab, address):
                found.setdefault((kind, name), []).append(took)
            context.close()
            time.sleep(max(KEPT_S, EVERY_S) + 0.1)  # or the server has the lists of this round at hand in the next
        report.versions["chromium"] = chromium.version
        chromium.close()
    report.rows += [_told(name, kind, times) for (kind, name), times in found.items()]


def _looked(tab: Any, address: str) -> Iterator[tuple[str, str, float]]:
    """Each view from its click on, the first one from the address on; times are the browser's own."""
    tab.goto("about:blank")
    began = time.monotonic()
    tab.goto(f"{address}/#/{RUN}/overview")
    tab.wait_for_selector(VIEWS["Overview"])
    yield "view", "the first, from the address on", time.monotonic() - began
    for view, filled in VIEWS.items():
        click = f"[...document.querySelectorAll('nav a')].find((one) => one.textContent === '{view}')"
        yield "view", view, _until(tab, click, filled, 1)
        if view in PAGED:
            yield "page", view, _until(tab, f"{_MORE}", PAGED[view], 51)


#: The last button of the view by which it goes on.
_MORE = "[...document.querySelectorAll('button.more')].findLast((one) => !one.hidden)"


def _until(tab: Any, button: str, rows: str, count: int) -> float:
    """Seconds from a click until there are so many rows and they are painted."""
    took = tab.evaluate(f"""() => new Promise((done) => {{
      const began = performance.now();
      const painted = () => requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
      const look = () => {{
        if (document.querySelectorAll({rows!r}).length < {count}) return false;
        watcher.disconnect();
        painted();
        return true;
      }};
      const watcher = new MutationObserver(look);
      const clicked = {button};
      if (clicked.tagName === 'A') document.getElementById('content').replaceChildren();
      watcher.observe(document.getElementById('content'), {{ childList: true, subtree: true }});
      clicked.click();
      if (clicked.ariaCurrent) dispatchEvent(new HashChangeEvent('hashchange'));
    }})""")
    return float(took) / 1000


def _told(what: str, kind: str, times: list[float]) -> dict[str, Any]:
    ordered = sorted(round(1000 * one, 1) for one in times)
    return {"what": what, "kind": kind, "ms": ordered[-1], "median_ms": ordered[len(ordered) // 2]}


if __name__ == "__main__":
    execute(main)
