"""The page's server as an ASGI application: its paths and responses.

    /                              the page; its files are below /assets/
    /api/runs                      the runs of the folder
    /api/runs/RUN/overview         one on a screen; .../events sends it each second while the page is open
    /api/runs/RUN/curves           its curves
    /api/runs/RUN/settings         its configuration; ?other=RUN: differences to that run
    /api/runs/RUN/lanes            its lanes
    /api/runs/RUN/lists/NOUN       jobs, dead, groups, workers, weights, page by page (lists.py)
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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from penstock.config.reading.yaml_file import read_yaml
from penstock.console.cli.target import Target
from penstock.console.read.jobs import read_job
from penstock.console.read.lanes import list_lanes
from penstock.console.read.samples import open_samples
from penstock.console.read.trace.batch import trace_batch, trace_prompt
from penstock.console.read.trace.job import trace_job
from penstock.console.read.trace.sources import Sources, asked_of, sources_of
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
from penstock.errors import ConfigError, PenstockError
from penstock.names import LANES, Lane
from penstock.protocol import scripts, user_failures
from penstock.records.job import JobState
from penstock.redis.saved_config import CONFIG_FILE
from penstock.system.run_folder import RunFolder
from penstock.text import redact, safe_repr

_FOLDER = Path(__file__).parent / "assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def asset(path: str) -> Response:
    """Return the file at ``path`` (``views/curves.js``); raise NotThere if it does not exist."""
    held = _all().get(path)
    if held is None:
        raise NotThere(f"The page has no file {path!r}.")
    return Response(held, media_type=_TYPES[Path(path).suffix])


@cache
def _all() -> dict[str, bytes]:
    files = (path for path in _FOLDER.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in files}


#: Most jobs of one request.
MAX_ACTION_JOBS = 1000
#: Recorded as the author of a pause.
BY = "a person at the page"


def requeue(target: Target, jobs: Sequence[str]) -> list[str]:
    """Requeue dead-lettered jobs with all their attempts; return those that were. Blocks for a round trip each."""
    model = next(iter(target.models()), "policy")
    return [one for one in _few(jobs) if scripts.run(target.client, scripts.requeue(target.keys, one, model))]


def purge(target: Target, jobs: Sequence[str]) -> list[str]:
    """Purge dead-lettered jobs; return those that were. Blocks for a round trip each."""
    subs = target.subs()
    calls = ((one, scripts.cancel(target.keys, one, subs, only=JobState.DEAD)) for one in _few(jobs))
    return [one for one, call in calls if scripts.run(target.client, call) == JobState.DEAD]


def close_lane(target: Target, lane: str, closed: bool) -> bool:
    """Pause or resume a lane; return False if it was so already. Blocks for a round trip."""
    if lane not in LANES:
        raise ConfigError(f"There is no lane {lane!r}: there are {', '.join(LANES)}.")
    if closed:
        return user_failures.pause(target.client, target.keys, Lane(lane), BY)
    return user_failures.resume(target.client, target.keys, Lane(lane))


def _few(jobs: Sequence[str]) -> Sequence[str]:
    if len(jobs) > MAX_ACTION_JOBS:
        raise ConfigError(f"These are {len(jobs):,} jobs: name at most {MAX_ACTION_JOBS:,} at once.")
    return jobs


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
            sources = sources_of(folder.path, samples, live)
            kind, told = (
                ("batch", trace_batch(sources, asked))
                if asked.batch is not None
                else ("job", _job(sources, asked.job, asked.sample))
                if asked.job
                else ("prompt", {"jobs": trace_prompt(sources, asked)})
            )
            if not told or told.get("jobs") == []:
                raise NotThere(f"Run {folder.path.name} knows nothing of {safe_repr(of)}.")
            return {"kind": kind, "of": of, "told": _cut(told), "problems": samples.problems}


def _job(sources: Sources, job: str, sample: str) -> dict[str, Any] | None:
    told = trace_job(sources, job, sample)
    if told is None:
        return None
    stages = {stage["name"] for one in told["samples"] for stage in one["stages"]}
    return told | {"sample": sample, "meaning": {name: text for name, text in MEANING.items() if name in stages}}


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
    paths = _Paths(directory, acts=token is not None)
    for path, answer in paths.reading().items():
        app.get(path)(answer)
    for path, answer in paths.acting().items():
        app.post(path)(answer)
    return Guard(app, token)


class DeadWish(BaseModel):
    """Dead-lettered jobs to requeue or purge."""

    model_config = ConfigDict(extra="forbid")

    do: Literal["requeue", "purge"]
    jobs: list[str]


class LaneWish(BaseModel):
    """A lane to pause or resume."""

    model_config = ConfigDict(extra="forbid")

    lane: str
    closed: bool


class _Paths:
    """Handlers of the paths."""

    def __init__(self, directory: Path, *, acts: bool) -> None:
        self._acts = acts
        self._runs = Runs(directory)
        self._looks = Looks(directory)
        self._lists = Lists()
        self._samples = Samples(self._looks)
        self._traces = Traces(self._looks)
        self._streams = Streams()

    def reading(self) -> dict[str, Any]:
        return {
            "/": self.page,
            "/assets/{path:path}": self.asset,
            "/api/runs": self.runs,
            "/api/runs/{run}/overview": self.overview,
            "/api/runs/{run}/events": self.events,
            "/api/runs/{run}/curves": self.curves,
            "/api/runs/{run}/settings": self.settings,
            "/api/runs/{run}/lanes": self.lanes,
            "/api/runs/{run}/lists/{noun}": self.rows,
            "/api/runs/{run}/fleet": self.fleet,
            "/api/runs/{run}/published": self.published,
            "/api/runs/{run}/job": self.job,
            "/api/runs/{run}/trace": self.trace,
            "/api/runs/{run}/samples": self.samples,
            "/api/runs/{run}/sample": self.sample,
            "/api/runs/{run}/newest": self.newest,
            "/api/runs/{run}/evals": self.evals,
            "/api/runs/{run}/categories": self.categories,
            "/api/runs/{run}/prompts": self.prompts,
            "/api/runs/{run}/answers": self.answers,
        }

    def acting(self) -> dict[str, Any]:
        return {"/api/runs/{run}/dead": self.dead, "/api/runs/{run}/lane": self.lane}

    def page(self) -> Response:
        return asset("index.html")

    def asset(self, path: str) -> Response:
        return asset(path)

    def runs(self) -> Response:
        return Json({"directory": str(self._runs.directory), "acts": self._acts, "runs": self._runs.all()})

    def overview(self, run: str) -> Response:
        return Json(self._overview(run))

    async def events(self, run: str) -> Response:
        await run_in_threadpool(self._runs.folder, run)
        if not self._streams.has_room():
            return refusal(503, f"More than {MAX_STREAMS} pages follow a run: close some.")
        stream = self._streams.follow("overview", lambda: self._overview(run))
        return StreamingResponse(stream, media_type="text/event-stream")

    def curves(self, run: str) -> Response:
        bound = setting(self._runs.folder(run), "staleness.bound")
        return Json({"run": run, "charts": curves(self._runs.rows(run), bound)})

    def settings(self, run: str, other: str = "") -> Response:
        held = settings(self._runs.folder(run))
        if not other:
            return Json({"run": run, "settings": [*held.items()]})
        return Json({"run": run, "other": other, "differences": differences(held, settings(self._runs.folder(other)))})

    def lanes(self, run: str) -> Response:
        target, state = self._looks.target(self._name(run)), self._looks.look(run).state
        rest = {name: state[name] for name in ("delayed", "dead", "ready", "kept", "inflight")}
        return Json({"run": run, "lanes": list_lanes(target.client, target.keys, state), **rest})

    def rows(
        self,
        run: str,
        noun: str,
        where: Annotated[list[str] | None, Query()] = None,
        sort: str = "",
        limit: int = 50,
        after: str = "",
    ) -> Response:
        target = self._looks.target(self._name(run))
        page = self._lists.page(target, noun, where=where or (), sort=sort, limit=limit, after=after)
        return Json({"run": run, **asdict(page)})

    def fleet(self, run: str) -> Response:
        target = self._looks.target(self._name(run))
        return Json({"run": run, "fleet": read_fleet(target.client, target.keys)})

    def published(self, run: str) -> Response:
        return Json({"run": run, "rows": list_published(self._runs.rows(run).steps)})

    def job(self, run: str, id: str) -> Response:
        target = self._looks.target(self._name(run))
        found = read_job(target.client, target.keys, id)
        if found is None:
            raise NotThere(f"Run {run} holds no job {safe_repr(id)}: it never did, or is done with it.")
        return Json(found)

    def trace(self, run: str, of: str) -> Response:
        return Json(self._traces.trace(self._runs.folder(run), of))

    def samples(self, run: str, request: Request, sort: str = "", limit: int = 50, after: str = "") -> Response:
        asked = {name: text for name, text in request.query_params.items() if name not in ("sort", "limit", "after")}
        return Json(self._samples.page(self._runs.folder(run), asked, sort=sort, limit=limit, after=after))

    def sample(self, run: str, id: str) -> Response:
        return Json(self._samples.sample(self._runs.folder(run), id))

    def newest(self, run: str) -> Response:
        return Json(self._samples.newest(self._runs.folder(run)))

    def evals(self, run: str) -> Response:
        return Json(self._samples.evals(self._runs.folder(run)))

    def categories(self, run: str, dataset: str) -> Response:
        return Json(self._samples.categories(self._runs.folder(run), dataset))

    def prompts(self, run: str, dataset: str, order: str = "", after: int = 0) -> Response:
        return Json(self._samples.prompts(self._runs.folder(run), dataset, order=order, after=after))

    def answers(self, run: str, dataset: str, line: int) -> Response:
        return Json(self._samples.answers(self._runs.folder(run), dataset, line))

    def dead(self, run: str, wish: DeadWish) -> Response:
        target = self._looks.target(self._name(run))
        act = requeue if wish.do == "requeue" else purge
        return Json({"done": act(target, wish.jobs)})

    def lane(self, run: str, wish: LaneWish) -> Response:
        target = self._looks.target(self._name(run))
        return Json({"changed": close_lane(target, wish.lane, wish.closed)})

    def _name(self, run: str) -> str:
        """Return the name of an existing run."""
        return self._runs.folder(run).path.name

    def _overview(self, run: str) -> dict[str, Any]:
        """Return the overview; ``live``: Redis answers; ``silent``: why not; ``moved``: changes with the files."""
        folder, rows = self._runs.folder(run), self._runs.rows(run)
        steps = setting(folder, "trainer.steps")
        about = {"run": run, **state_of(folder), "moved": sizes(folder.path)}
        try:
            seen = overview(self._looks.look(run), rows, steps)
            # The process that runs it is on another machine.
            state = "running" if about["state"] == "killed" else about["state"]
            return {**about, "state": state, "live": True, "silent": "", **seen}
        except (PenstockError, RedisError) as exc:
            over = overview_of_files(rows, summary_of(folder), steps)
            return {**about, "live": False, "silent": redact(str(exc)), **over}
