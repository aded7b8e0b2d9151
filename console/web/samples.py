"""Samples of a run from its history and its Redis: page by page, one of them, and evaluations."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends

from penstock.console.read.evals import answers_to, list_categories, list_evals, prompts_over_versions
from penstock.console.read.samples import listed, newest_batch, open_live, open_samples, shown, token_rows, turn_rows
from penstock.console.read.stages import MEANING, asked_of, sources_of
from penstock.console.read.trace import find_trace
from penstock.console.web.replies import NotThere
from penstock.console.web.runs import Looks, Runs
from penstock.errors import ConfigError, PenstockError
from penstock.history.eval_rows import FILE, read_rows
from penstock.history.filters import Filters, Sort
from penstock.history.reader import HistoryReader
from penstock.history.row import ARRAYS, SampleRow
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.text import safe_repr as in_short

#: Most samples of a page; characters of a text in it; tokens of one sample.
MAX_LIMIT = 200
MAX_TEXT = 2000
MAX_TOKENS = 8192
#: Most samples, events and jobs of a trace that are shown, and characters of a prompt.
MOST_OF_TRACE = {"samples": 64, "events": 500, "jobs": 500, "prompt": 4000}
#: Most versions that answer one prompt side by side.
MAX_ANSWERS = 200
#: Pseudo-fate that selects samples whose fate is open; they have no text before they leave Redis.
OPEN = "open"
#: Answers shown from either end of the newest batch's rewards.
NUM_ENDS = 4


class Samples:
    """Samples of the runs of one folder."""

    def __init__(self, runs: Runs, looks: Looks) -> None:
        self._runs, self._looks = runs, looks

    def samples(
        self, run: str, filters: Annotated[Filters, Depends()], sort: str = "", limit: int = 50, after: str = ""
    ) -> dict[str, Any]:
        """Return the selected samples, greatest first. Blocks for the disk and for Redis.

        Args:
            sort: a ``Sort``; ``-SORT``: smallest first.
            after: ``next`` of the page before; '' for the first.

        Raises:
            ConfigError: an invalid filter, order or ``after``.
        """
        is_open, order = filters.fate == OPEN, _order(sort)
        with self._settled(run, is_open=is_open) as samples:
            filters = replace(filters, fate="") if is_open else filters
            found = samples.rows(filters, order, max(1, min(limit, MAX_LIMIT)), after, ascending=sort.startswith("-"))
            rows = [_cut(listed(row)) for row in found.rows]
            there = samples.is_there or bool(rows) or is_open
            return {"rows": rows, "next": found.next or None, "there": there, "problems": samples.problems}

    def newest(self, run: str) -> dict[str, Any]:
        """Return the best and the worst rewarded answers of the newest trained batch, one per group.

        ``batch`` is None without such a batch; ``worst`` is empty if all rewards are equal. Blocks for the disk.
        """
        with closing(open_samples(self._folder(run))) as samples:
            used = newest_batch(samples)
            if used is None:
                about = {"there": samples.is_there, "problems": samples.problems}
                return {"batch": None, "best": [], "worst": [], **about}
            filters = Filters(batch=used.batch, subscription=used.subscription)
            best, worst = (samples.rows(filters, Sort.REWARD, MAX_LIMIT, ascending=up).rows for up in (False, True))
            if best and best[0].reward == worst[0].reward:
                worst = []
            about = {"batch": used.batch, "subscription": used.subscription, "version": used.version, "there": True}
            return about | {"best": _ends(best), "worst": _ends(worst)}

    def sample(self, run: str, id: str) -> dict[str, Any]:
        """Return all data of one sample. Raises NotThere, or ConfigError for an invalid id."""
        with self._open(run) as samples:
            row, folder = samples.row(id), self._folder(run)
            if row is None:
                raise NotThere(f"Run {run} keeps no sample {in_short(id)}.")
            about = {name: value for name, value in shown(row, samples.uses(id)).items() if name not in ARRAYS}
            drawn = token_rows(folder, row, MAX_TOKENS)
            num_drawn = 0 if row.generated is None else int(row.generated.sum())
            left = max(0, num_drawn - len(drawn))
            return {**about, "turns": turn_rows(folder, row), "drawn": drawn, "num_left": left}

    def evals(self, run: str) -> dict[str, Any]:
        """Return scores of held-out prompts by dataset and version."""
        with self._open(run) as samples:
            rows = list_evals(samples, records=read_rows(self._folder(run) / FILE))
            return {"rows": rows, "there": samples.is_there, "problems": samples.problems}

    def categories(self, run: str, dataset: str) -> dict[str, Any]:
        """Return scores of a dataset's held-out prompts by category, of the newest evaluated version."""
        with self._open(run) as samples:
            return {"rows": list_categories(samples, dataset, newest=True)}

    def answers(self, run: str, dataset: str, line: int) -> dict[str, Any]:
        """Return the newest versions' answers to one held-out prompt."""
        with self._open(run) as samples:
            found = answers_to(samples, dataset, line)
            shown = found[-MAX_ANSWERS:]
            return {"rows": [_cut(row) for row in shown], "omitted": len(found) - len(shown)}

    def prompts(self, run: str, dataset: str, order: str = "", after: int = 0) -> dict[str, Any]:
        """Return rewards of held-out prompts by version, page by page. Raises ConfigError for an invalid order."""
        with self._open(run) as samples:
            page = prompts_over_versions(samples, dataset, order=order, after=after)
        return {**page, "rows": [_cut(row) for row in page["rows"]]}

    def trace(self, run: str, of: str) -> dict[str, Any]:
        """Return ``kind``: job, prompt or batch; and its trace as ``told``. Blocks for the disk and for Redis.

        Raises:
            ConfigError: ``of`` is not a valid target.
            NotThere: it is unknown.
        """
        asked, folder, live = asked_of(of), self._folder(run), self._live(run)
        with closing(open_samples(folder, live)) as samples:
            kind, told = find_trace(sources_of(folder, samples, live), asked)
            if told is None:
                raise NotThere(f"Run {run} knows nothing of {in_short(of)}.")
            if kind == "job":
                stages = {stage["name"] for one in told["samples"] for stage in one["stages"]}
                meaning = {name: text for name, text in MEANING.items() if name in stages}
                told |= {"sample": asked.sample, "meaning": meaning}
            for name, most in MOST_OF_TRACE.items():
                if name in told:
                    told |= {f"num_{name}": len(told[name]), name: told[name][:most]}
            return {"kind": kind, "of": of, "told": told, "problems": samples.problems}

    def _folder(self, run: str) -> Path:
        return self._runs.folder(run).path

    @contextmanager
    def _settled(self, run: str, *, is_open: bool) -> Iterator[HistoryReader]:
        """Open the history if there is one, as samples in Redis have no text; else, or if requested, Redis."""
        with closing(open_samples(self._folder(run))) as samples:
            if samples.is_there and not is_open:
                yield samples
                return
        with closing(open_live(self._folder(run), self._live(run))) as samples:
            yield samples

    @contextmanager
    def _open(self, run: str) -> Iterator[HistoryReader]:
        with closing(open_samples(self._folder(run), self._live(run))) as samples:
            yield samples

    def _live(self, run: str) -> tuple[Client, Keys] | None:
        try:
            target = self._looks.target(run)
        except PenstockError:
            return None
        return target.client, target.keys


def _ends(rows: Iterable[SampleRow]) -> list[dict[str, Any]]:
    """Return the first of each group, up to the number shown."""
    firsts: dict[str, SampleRow] = {}
    for row in rows:
        firsts.setdefault(row.job, row)
    return [_cut(listed(row)) for row in islice(firsts.values(), NUM_ENDS)]


def _order(sort: str) -> Sort:
    name = sort.removeprefix("-") or Sort.RECORDED
    if name not in set(Sort):
        raise ConfigError(f"invalid sort {in_short(sort)}: samples can be sorted by {', '.join(Sort)}.")
    return Sort(name)


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in row.items()}
