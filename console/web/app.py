"""The page's server as an ASGI application: its paths and responses.

    /                              the page; its files are below /assets/
    /api/runs                      the runs of the folder
    /api/runs/RUN/overview         one on a screen; .../events sends it each second while the page is open
    /api/runs/RUN/curves           its curves
    /api/runs/RUN/settings         its configuration; ?other=RUN: differences to that run
    /api/runs/RUN/lists/NOUN       jobs, dead, lanes, groups, workers, weights, ... page by page (lists.py)
    /api/runs/RUN/fleet            groups, processes and autoscaler of `penstock fleet`, null if it is not running
    /api/runs/RUN/published        durations of publications, by the trainer's steps
    /api/runs/RUN/job?id=JOB       one job
    /api/runs/RUN/trace?of=THING   a job, sample, prompt or batch from its prompt to its step
    /api/runs/RUN/samples          samples page by page (samples.py); .../sample?id=SAMPLE: one of them
    /api/runs/RUN/newest           the best and the worst rewarded answers of the batch that was trained last
    /api/runs/RUN/evals            scores of held-out prompts; .../prompts?dataset=D: each over versions, page by page;
                                   .../answers?dataset=D&line=L: how versions answered one of them;
                                   .../categories?dataset=D: scores of the newest version by category
    POST /api/runs/RUN/dead        {"do": "requeue" | "purge", "jobs": [...]}
    POST /api/runs/RUN/lane        {"lane": "eval", "closed": true}

Each read request runs in a thread of its own, so none blocks another.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from penstock.config.reading.yaml_file import read_yaml
from penstock.console.cli.target import Target
from penstock.console.read.jobs import read_job
from penstock.console.read.samples import open_samples
from penstock.console.read.trace.batch import find_trace
from penstock.console.read.trace.sources import asked_of, sources_of
from penstock.console.read.trace.stages import MEANING
from penstock.console.read.weights import list_published
from penstock.console.read.workers import read_fleet
from penstock.console.web.curves import curves
from penstock.console.web.guard import Guard
from penstock.console.web.lists import Lists
from penstock.console.web.overview import overview, overview_of_files
from penstock.console.web.replies import MAX_STREAMS, Json, NotThere, Streams, explain_errors, refusal
from penstock.console.web.run_snapshots import Looks
from penstock.console.web.runs import Runs, sizes, state_of, summary_of
from penstock.console.web.samples import Samples
from penstock.consumers.grpo.rows import Rows
from penstock.errors import ConfigError, PenstockError
from penstock.names import Lane
from penstock.protocol import user_failures
from penstock.redis.saved_config import CONFIG_FILE
from penstock.system.run_folder import RunFolder
from penstock.text import redact, safe_repr

_FOLDER = (Path(__file__).parent / "assets").resolve()

#: Most jobs of one request.
MAX_ACTION_JOBS = 1000
#: Recorded as the author of a pause.
BY = "a person at the page"


#: Most samples, events and jobs shown, and characters of a prompt.
MAX_SAMPLES, MAX_EVENTS, MAX_JOBS, MAX_TEXT = 64, 500, 500, 4000


class Traces:
    """Traces of the runs of one folder."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks

    def trace(self, folder: RunFolder, of: str) -> dict[str, Any]:
        """Return ``kind``: job, prompt or batch; and its trace as ``told``. Blocks for the disk and for Redis.

        Raises:
            ConfigError: ``of`` is not a valid target.
            NotThere: it is unknown.
        """
        asked = asked_of(of)
        try:
            target = self._looks.target(folder.path.name)
            live = target.client, target.keys
        except PenstockError:
            live = None
        with closing(open_samples(folder.path, live)) as samples:
            kind, told = find_trace(sources_of(folder.path, samples, live), asked)
            if told is None:
                raise NotThere(f"Run {folder.path.name} knows nothing of {safe_repr(of)}.")
            if kind == "job":
                stages = {stage["name"] for one in told["samples"] for stage in one["stages"]}
                meaning = {name: text for name, text in MEANING.items() if name in stages}
                told |= {"sample": asked.sample, "meaning": meaning}
            return {"kind": kind, "of": of, "told": _cut(told), "problems": samples.problems}


def _cut(told: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(told)
    for name, most in (("samples", MAX_SAMPLES), ("events", MAX_EVENTS), ("jobs", MAX_JOBS), ("prompt", MAX_TEXT)):
        if name in found:
            found[f"num_{name}"], found[name] = len(found[name]), found[name][:most]
    return found


def settings(folder: RunFolder) -> Mapping[str, Any]:
    """Return every key of a run's ``config.yaml`` (``trainer.lr``) with its value; {} without the file.

    Secrets were masked when it was written.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder.path / CONFIG_FILE
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=8)
def _read(path: Path, _: int) -> Mapping[str, Any]:
    return dict(_flat("", read_yaml(path)))


def setting(folder: RunFolder, key: str) -> int | None:
    """Return an integer setting; None if it is not set."""
    try:
        value = settings(folder).get(key)
    except ConfigError:
        return None
    return value if type(value) is int else None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return keys whose values differ, in order, with both; None if a run has no such key."""
    keys = sorted(one.keys() | other.keys())
    return [(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [found for name, entry in inner for found in _flat(f"{key}.{name}" if key else str(name), entry)]
    if below:
        yield from below
    else:
        yield key, redact(value) if isinstance(value, str) else value


def make_app(directory: Path, *, token: str | None = None) -> Guard:
    """Return the application for the runs of a folder.

    Args:
        token: required for actions; None: no actions.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    explain_errors(app)
    runs, looks, lists, streams = Runs(directory), Looks(directory), Lists(), Streams()
    samples, traces = Samples(looks), Traces(looks)

    def target_of(run: str) -> Target:
        return looks.target(runs.folder(run).path.name)

    def read(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Answer GET requests for a path of a run with the function's result as JSON."""

        def add(handler: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(handler)
            def answer(*args: Any, **given: Any) -> Response:
                return Json(handler(*args, **given))

            app.get(f"/api/runs/{{run}}/{path}", response_model=None)(answer)
            return handler

        return add

    @app.get("/")
    def page() -> Response:
        return FileResponse(_FOLDER / "index.html")

    app.mount("/assets", StaticFiles(directory=_FOLDER))

    @app.get("/api/runs")
    def all_runs() -> Response:
        return Json({"directory": str(runs.directory), "acts": token is not None, "runs": runs.all()})

    @app.get("/api/runs/{run}/events")
    async def events(run: str) -> Response:
        await run_in_threadpool(runs.folder, run)
        if not streams.has_room():
            return refusal(503, f"More than {MAX_STREAMS} pages follow a run: close some.")
        stream = streams.follow("overview", lambda: overview_of(run))
        return StreamingResponse(stream, media_type="text/event-stream")

    @read("overview")
    def overview_of(run: str) -> dict[str, Any]:
        return _overview(runs.folder(run), runs.rows(run), looks)

    @read("curves")
    def curves_of(run: str) -> Any:
        return {"run": run, "charts": curves(runs.rows(run), setting(runs.folder(run), "staleness.bound"))}

    @read("settings")
    def settings_of(run: str, other: str = "") -> Any:
        held = settings(runs.folder(run))
        if not other:
            return {"run": run, "settings": [*held.items()]}
        return {"run": run, "other": other, "differences": differences(held, settings(runs.folder(other)))}

    @read("lists/{noun}")
    def rows(
        run: str,
        noun: str,
        where: Annotated[list[str] | None, Query()] = None,
        sort: str = "",
        limit: int = 50,
        after: str = "",
    ) -> Any:
        found = lists.page(target_of(run), noun, where=where or (), sort=sort, limit=limit, after=after)
        return {"run": run, **found}

    @read("fleet")
    def fleet(run: str) -> Any:
        target = target_of(run)
        return {"run": run, "fleet": read_fleet(target.client, target.keys)}

    @read("published")
    def published(run: str) -> Any:
        return {"run": run, "rows": list_published(runs.rows(run).steps)}

    @read("job")
    def job(run: str, id: str) -> Any:
        target = target_of(run)
        found = read_job(target.client, target.keys, id)
        if found is None:
            raise NotThere(f"Run {run} holds no job {safe_repr(id)}: it never did, or is done with it.")
        return found

    @read("trace")
    def trace(run: str, of: str) -> Any:
        return traces.trace(runs.folder(run), of)

    @read("samples")
    def list_samples(run: str, request: Request, sort: str = "", limit: int = 50, after: str = "") -> Any:
        asked = {name: text for name, text in request.query_params.items() if name not in ("sort", "limit", "after")}
        return samples.page(runs.folder(run), asked, sort=sort, limit=limit, after=after)

    @read("sample")
    def sample(run: str, id: str) -> Any:
        return samples.sample(runs.folder(run), id)

    @read("newest")
    def newest(run: str) -> Any:
        return samples.newest(runs.folder(run))

    @read("evals")
    def evals(run: str) -> Any:
        return samples.evals(runs.folder(run))

    @read("categories")
    def categories(run: str, dataset: str) -> Any:
        return samples.categories(runs.folder(run), dataset)

    @read("prompts")
    def prompts(run: str, dataset: str, order: str = "", after: int = 0) -> Any:
        return samples.prompts(runs.folder(run), dataset, order=order, after=after)

    @read("answers")
    def answers(run: str, dataset: str, line: int) -> Any:
        return samples.answers(runs.folder(run), dataset, line)

    @app.post("/api/runs/{run}/dead")
    def dead(run: str, wish: DeadWish) -> Response:
        if len(wish.jobs) > MAX_ACTION_JOBS:
            raise ConfigError(f"These are {len(wish.jobs):,} jobs: name at most {MAX_ACTION_JOBS:,} at once.")
        target = target_of(run)
        return Json({"done": (target.requeue if wish.do == "requeue" else target.purge)(wish.jobs)})

    @app.post("/api/runs/{run}/lane")
    def lane(run: str, wish: LaneWish) -> Response:
        target = target_of(run)
        act = partial(user_failures.pause, by=BY) if wish.closed else user_failures.resume
        return Json({"changed": act(target.client, target.keys, wish.lane)})

    return Guard(app, token)


class DeadWish(BaseModel):
    """Dead-lettered jobs to requeue or purge."""

    model_config = ConfigDict(extra="forbid")

    do: Literal["requeue", "purge"]
    jobs: list[str]


class LaneWish(BaseModel):
    """A lane to pause or resume."""

    model_config = ConfigDict(extra="forbid")

    lane: Lane
    closed: bool


def _overview(folder: RunFolder, rows: Rows, looks: Looks) -> dict[str, Any]:
    """Return the overview; ``live``: Redis answers; ``silent``: why not; ``moved``: changes with the files."""
    steps = setting(folder, "trainer.steps")
    about = {"run": folder.path.name, **state_of(folder), "moved": sizes(folder.path)}
    try:
        seen = overview(looks.look(folder.path.name), rows, steps)
        # The process that runs it is on another machine.
        state = "running" if about["state"] == "killed" else about["state"]
        return {**about, "state": state, "live": True, "silent": "", **seen}
    except (PenstockError, RedisError) as exc:
        over = overview_of_files(rows, summary_of(folder), steps)
        return {**about, "live": False, "silent": redact(str(exc)), **over}
