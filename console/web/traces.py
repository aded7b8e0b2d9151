"""The trace of one job, prompt or batch, as in `penstock trace`, with data for a waterfall chart."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from penstock.console.read.samples import open_samples
from penstock.console.read.trace.asked import asked_of
from penstock.console.read.trace.batch import trace_batch, trace_prompt
from penstock.console.read.trace.job import trace_job
from penstock.console.read.trace.sources import Sources, sources_of
from penstock.console.read.trace.stages import MEANING
from penstock.console.web.looks import Looks
from penstock.console.web.replies import NotThere
from penstock.errors import PenstockError
from penstock.system.run_folder import RunFolder
from penstock.text import safe_repr

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
