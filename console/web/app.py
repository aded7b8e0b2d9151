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
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool

from penstock.config.reading.yaml_file import read_yaml
from penstock.console.cli.target import Target
from penstock.console.read.jobs import read_job
from penstock.console.read.parts import read_fleet
from penstock.console.read.weights import list_published
from penstock.console.web.curves import curves
from penstock.console.web.guard import Guard
from penstock.console.web.lists import Lists
from penstock.console.web.overview import overview, overview_of_files
from penstock.console.web.replies import MAX_STREAMS, Json, NotThere, Streams, explain_errors, refusal
from penstock.console.web.runs import Looks, Runs, sizes, state_of, summary_of
from penstock.console.web.samples import Samples
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


class Page:
    """Answer requests about the runs of one folder, beside those about their samples."""

    def __init__(self, directory: Path) -> None:
        self.runs, self.looks, self._lists = Runs(directory), Looks(directory), Lists()

    def _target(self, run: str) -> Target:
        return self.looks.target(self.runs.folder(run).path.name)

    def overview(self, run: str) -> dict[str, Any]:
        """Return the overview; ``live``: Redis answers; ``silent``: why not; ``moved``: changes with the files."""
        folder, rows = self.runs.folder(run), self.runs.rows(run)
        steps = setting(folder, "trainer.steps")
        about = {"run": run, **state_of(folder), "moved": sizes(folder.path)}
        try:
            seen = overview(self.looks.look(run), rows, steps)
            # The process that runs it is on another machine.
            state = "running" if about["state"] == "killed" else about["state"]
            return {**about, "state": state, "live": True, "silent": "", **seen}
        except (PenstockError, RedisError) as exc:
            over = overview_of_files(rows, summary_of(folder), steps)
            return {**about, "live": False, "silent": redact(str(exc)), **over}

    def curves(self, run: str) -> Any:
        bound = setting(self.runs.folder(run), "staleness.bound")
        return {"run": run, "charts": curves(self.runs.rows(run), bound)}

    def settings(self, run: str, other: str = "") -> Any:
        held = settings(self.runs.folder(run))
        if not other:
            return {"run": run, "settings": [*held.items()]}
        return {"run": run, "other": other, "differences": differences(held, settings(self.runs.folder(other)))}

    def rows(
        self,
        run: str,
        noun: str,
        where: Annotated[list[str] | None, Query()] = None,
        sort: str = "",
        limit: int = 50,
        after: Annotated[int, Query(ge=0)] = 0,
    ) -> Any:
        found = self._lists.page(self._target(run), noun, where=where or (), sort=sort, limit=limit, after=after)
        return {"run": run, **found}

    def fleet(self, run: str) -> Any:
        target = self._target(run)
        return {"run": run, "fleet": read_fleet(target.client, target.keys)}

    def published(self, run: str) -> Any:
        return {"run": run, "rows": list_published(self.runs.rows(run).steps)}

    def job(self, run: str, id: str) -> Any:
        target = self._target(run)
        found = read_job(target.client, target.keys, id)
        if found is None:
            raise NotThere(f"Run {run} holds no job {safe_repr(id)}: it never did, or is done with it.")
        return found

    def dead(self, run: str, wish: DeadWish) -> Any:
        if len(wish.jobs) > MAX_ACTION_JOBS:
            raise ConfigError(f"These are {len(wish.jobs):,} jobs: name at most {MAX_ACTION_JOBS:,} at once.")
        target = self._target(run)
        return {"done": (target.requeue if wish.do == "requeue" else target.purge)(wish.jobs)}

    def lane(self, run: str, wish: LaneWish) -> Any:
        target = self._target(run)
        act = partial(user_failures.pause, by=BY) if wish.closed else user_failures.resume
        return {"changed": act(target.client, target.keys, wish.lane)}


def make_app(directory: Path, *, token: str | None = None) -> Guard:
    """Return the application for the runs of a folder.

    Args:
        token: required for actions; None: no actions.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    explain_errors(app)
    page, streams = Page(directory), Streams()
    samples = Samples(page.runs, page.looks)
    of_run = ("overview", "curves", "settings", "fleet", "published", "job")
    of_samples = ("trace", "samples", "sample", "newest", "evals", "categories", "prompts", "answers")
    reads: dict[str, Callable[..., Any]] = {"lists/{noun}": page.rows, **{name: getattr(page, name) for name in of_run}}
    reads |= {name: getattr(samples, name) for name in of_samples}
    for path, read in reads.items():
        app.get(f"/api/runs/{{run}}/{path}", response_model=None)(_as_json(read))
    acts: dict[str, Callable[..., Any]] = {"dead": page.dead, "lane": page.lane}
    for path, act in acts.items():
        app.post(f"/api/runs/{{run}}/{path}", response_model=None)(_as_json(act))
    app.mount("/assets", StaticFiles(directory=_FOLDER))

    @app.get("/")
    def index() -> Response:
        return FileResponse(_FOLDER / "index.html")

    @app.get("/api/runs")
    def all_runs() -> Response:
        return Json({"directory": str(directory), "acts": token is not None, "runs": page.runs.all()})

    @app.get("/api/runs/{run}/events")
    async def events(run: str) -> Response:
        await run_in_threadpool(page.runs.folder, run)
        if not streams.has_room():
            return refusal(503, f"More than {MAX_STREAMS} pages follow a run: close some.")
        stream = streams.follow("overview", lambda: page.overview(run))
        return StreamingResponse(stream, media_type="text/event-stream")

    return Guard(app, token)


def _as_json(handler: Callable[..., Any]) -> Callable[..., Response]:
    """Return the function as an answer to requests: its result as JSON."""

    @wraps(handler)
    def answer(*args: Any, **given: Any) -> Response:
        return Json(handler(*args, **given))

    return answer
