"""Every resource that the console shows, declared once: its reader, its columns with their meaning, its key.

`penstock NOUN ls`, `show`, `--json`, `--where`, the tables of `status` and `top`, and the
lists of the page are made from this table. `penstock NOUN ls --help` prints what the columns mean.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

from penstock.console.terminal import duration, excerpt

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a row, which `--json` has under the same name."""

    name: str
    #: How it is shown: a key of ``_FORMATS``, or text.
    kind: str
    meaning: str
    #: Whether tables show it, and whether the page's list does; ``--json`` and filters know it in any case.
    shown: bool
    on_page: bool = True

    @property
    def title(self) -> str:
        """Return the heading on the page."""
        name = self.name.replace("_per_s", "/s").removesuffix("_s").removesuffix("_ms").removeprefix("num_")
        return name.replace("_", " ").capitalize()

    def cell(self, row: Row) -> str:
        """Return the value as text; '' if it is unknown."""
        value = row.get(self.name)
        try:
            return "" if value is None else _FORMATS.get(self.kind, text_of)(value)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
            return text_of(value)  # not what a reader of penstock writes


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of row."""

    #: Heading of its tables.
    title: str
    #: Fields that identify a row; the first names it.
    key: tuple[str, ...]
    #: Help of its group of commands, and of ``ls``.
    noun: str = ""
    about: str = ""
    #: Function of (client, keys) that returns all rows, and of (client, keys, id) that returns one in detail, or None;
    #: paths below ``penstock``.
    read: str = ""
    one: str = ""
    #: Order by default.
    sort: str | None = None
    #: Path of further field names, which are in ``--json`` only.
    also: str = ""
    columns: tuple[Column, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields that filters and the sort order may name."""
        return tuple(dict.fromkeys([*(one.name for one in self.columns), *(_found(self.also) if self.also else ())]))

    @property
    def shown(self) -> tuple[Column, ...]:
        return tuple(one for one in self.columns if one.shown)

    @property
    def on_page(self) -> tuple[Column, ...]:
        return tuple(one for one in self.columns if one.on_page)

    def rows(self, client: Any, keys: Any) -> list[Row]:
        """Return all rows. Blocks as the reader."""
        return list(_found(self.read)(client, keys))

    def details(self, client: Any, keys: Any, name: str) -> dict[str, Any] | None:
        """Return one row with all that is known of it; None if it does not exist. Blocks as the reader."""
        found: dict[str, Any] | None = _found(self.one)(client, keys, name)
        return found

    def meanings(self) -> str:
        """Return what each column means, a line each."""
        width = max(len(one.name) for one in self.columns)
        return "\n".join(f"{one.name:<{width}}  {one.meaning}" for one in self.columns)


@cache
def _found(path: str) -> Any:
    # Readers are imported when they are called: `penstock --help` loads none of them.
    return resolve_name(f"penstock.{path}")


def text_of(value: Any) -> str:
    """Return a value as text: a list by its entries, a map by its pairs, other numbers than integers short."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of(one)}" for name, one in value.items())
    return ", ".join(map(text_of, value)) if isinstance(value, list | tuple) else str(value)


def clock(at: float) -> str:
    """Format Unix seconds as a time in UTC; an invalid one as a number."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return str(at)


def _gpu(one: Row) -> str:
    use = f"{one['use']:.0%} busy, " if one["use"] >= 0 else ""
    return f"{use}{_bytes(one['used_bytes'])} of {_bytes(one['size_bytes'])}"


def _bytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 else f"{value / 1e6:,.1f} MB"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "share": lambda value: f"{value:.1%}",
    "seconds": duration,
    "rate": lambda value: f"{value:,.1f}",
    "bytes": _bytes,
    "clock_ms": lambda value: clock(value / 1000),
    "last_line": _last_line,
    "excerpt": excerpt,
    "gpus": lambda value: "; ".join(map(_gpu, value)),
    "pairs": lambda value: excerpt(text_of(value)),
    "mean": lambda value: f"{value:.3f}",
    "by_k": lambda value: ", ".join(f"{k}: {rate:.3g}" for k, rate in value.items()),
}
#: Kinds whose cells are aligned to the right on the page.
NUMBERS = frozenset(("number", "share", "seconds", "rate", "bytes", "mean"))


def _columns(text: str) -> tuple[Column, ...]:
    """Parse a line per column: name, kind, meaning; before the name * if tables show it, + if the page alone does."""
    lines = (line.split(maxsplit=2) for line in text.splitlines() if line.strip())
    return tuple(
        Column(name.lstrip("*+"), kind, meaning, name[0] == "*", name[0] in "*+") for name, kind, meaning in lines
    )


JOBS = Resource(
    "jobs", ("job",), "Jobs in the queues.", "List jobs with their state, lane, versions and attempts.",
    "console.read.jobs.list_jobs", "console.read.jobs.read_job", sort="job", columns=_columns("""
        *job          text     its id: DATASET/EPOCH/LINE
        *state        text     queued, leased, delayed (retried later), dead, ready (complete) or retiring
        home_lane     text     the lane that it was admitted to
        *lane         text     the lane that it is leased from now
        *committed    number   its committed samples
        *n            number   the samples that it is asked for
        *min_version  number   an engine needs at least this version to start it
        *version      number   the version that generated its first token
        *attempts     number   failed attempts
        *crashes      number   engines that crashed on it
        *worker       text     the worker that holds it
        seq           number   its position in the order of admission
    """))  # fmt: skip

DEAD = Resource(
    "dead letters", ("job", "buried_ms"), "Dead-lettered jobs.",
    "List dead-lettered jobs, oldest first, and how long they are.", "console.read.jobs.list_dead",
    "console.read.jobs.read_dead", columns=_columns("""
        *job            text       id of the job
        *reason         text       why its last attempt failed
        *attempts       number     failed attempts
        *crashes        number     engines that crashed on it
        *worker         text       the worker of its last attempt
        *buried_ms      clock_ms   when it became a dead letter
        *prompt_length  number     length of its prompt
        *prompt_unit    text       unit of that length: tokens or characters
        max_new_tokens  number     most tokens of an answer
        *answers        text       generated tokens of each finished answer
        *detail         last_line  the error; the last line of its traceback (`penstock dead show JOB` has all of it)
    """))  # fmt: skip

GROUPS = Resource(
    "ready groups", ("job", "subscription"), "Cut finished groups into batches for the trainers; `ls`: groups.",
    "List ready groups, per subscription of their lane: versions, staleness, age, and why they are not cut.",
    "console.read.groups.list_groups", columns=_columns("""
        *job           text     id of the job whose samples they are
        *subscription  text     a subscription of its lane
        *lane          text     lane of the job
        seq            number   its position in the order of admission
        *oldest        number   oldest version of its tokens
        *newest        number   newest version of its tokens
        *staleness     number   versions between its oldest token and the next batch
        *bound         number   most staleness that the subscription allows
        *samples       number   its samples
        *wanted        number   the samples that were asked for
        kept           number   samples whose payloads are permanent
        tokens         number   tokens, prompts included
        num_bytes      bytes    size of its payloads
        *reward_mean   mean     mean reward
        *age_s         seconds  time since it was complete
        batch          number   the last batch that held it
        *state         text     ready, cut, given up or unreadable
        *why           text     why it is in no batch yet, or which one has it
    """))  # fmt: skip

WORKERS = Resource(
    "workers", ("name",), "Workers.", "List live workers.", "console.read.parts.list_workers",
    "console.read.parts.read_worker", also="protocol.presence.WorkerPresence.__dataclass_fields__",
    columns=_columns("""
        *name             text     its name: the one that it was started with, and a random suffix
        *version          number   version of the weights that it generates with
        *state            state    serving, or why it does not: starting, no weights, draining, crash loop, ...
        *leased           number   jobs that it has leased
        *running          number   samples that are being generated
        *slots            number   most samples that are generated at once
        *tokens_per_s     rate     tokens generated per second, smoothed over a few seconds
        *host             text     its machine
        *pid              number   pid of its process
        *engine           text     kind and version of its engine
        *url              text     address of its engine or router
        +gpus             gpus     use and memory of its engine's GPUs
        +age_s            seconds  time since its last heartbeat
        +engine_restarts  number   restarts of its engine
        +lost_leases      number   leases that it lost
        +why              text     why it does not serve as it should
    """))  # fmt: skip

TRAINERS = Resource(
    "trainers", ("name", "rank"), "Trainers.",
    "List ranks of trainers: whether they run, step and version, batches committed and kept, figures, waits.",
    "console.read.parts.list_trainers", columns=_columns("""
        *name            text     its subscription
        *rank            number   the rank that reported these figures
        *state           text     running, parked (its groups are kept while it is away), gone, dropped or unreadable
        *step            number   last step
        *version         number   version of the weights that it trained with
        *cursor          number   last batch that all ranks committed
        *ckpt            number   last batch that a checkpoint has
        *reward_mean     mean     mean reward of the last batch
        *staleness_mean  mean     mean staleness of the last batch, in versions
        *staleness_max   number   most staleness of the last batch
        *wait_share      share    part of its time that it waited for batches
        *waits_for       text     what it waits for now
        pid              number   pid of its process
        *age_s           seconds  time since its last report
    """))  # fmt: skip

SUBS = Resource(
    "subscriptions", ("name",), "Subscriptions of trainers.",
    "List subscriptions with definition, position, held groups, and disposals by reason.",
    "console.read.parts.list_subs", also="protocol.subs.LISTED", columns=_columns("""
        *name         text     its name
        *state        text     running, parked (its groups are kept while its trainer is away), gone or unreadable
        *mode         text     how stale its batches may be: sync, one_step or async; asked: what its trainer asks for
        *bound        number   most staleness of a batch, in versions
        *share        text     how groups are shared with other subscriptions
        *size         number   size of a batch
        *unit         text     unit of that size: groups, samples or tokens
        *sampler      text     how groups are selected for a batch
        *cut          number   last batch that was cut
        *cursor       number   last batch that its trainer committed
        *ckpt         number   last batch that a checkpoint has
        *held_groups  number   groups that are kept for it
        *drops        text     groups that it gave up, by reason
        unreadable    text     what is wrong with its record
    """))  # fmt: skip

WEIGHTS = Resource(
    "publications", ("model", "id"), "Publications of weights.",
    "List publications, newest first: version, place, size, workers that have or load it, and what keeps it.",
    "console.read.weights.list_weights", columns=_columns("""
        *id         text     VERSION-REVISION
        *model      text     name of the model
        version     number   its version
        *step       number   the trainer's step that made it
        through     text     the version of its subscription's lineage
        *transport  text     how it reaches the workers
        *num_bytes  bytes    size of its files, or of its tensors
        *folder     text     whether its files are seen from this machine: here, not seen from here or still to come
        *write_s    seconds  time to write it
        *age_s      seconds  time since it was published
        *workers    text     workers that have it
        *loading    text     workers that load it
        *pinned_by  text     evaluations that keep it
        *path       text     its folder
        *state      text     newest; or why it is set aside
    """))  # fmt: skip

DATA = Resource(
    "datasets with a curriculum", ("dataset",), "Datasets with a curriculum, and the success rates of their prompts.",
    "List datasets: prompts generated for, the share of right answers, always and never right ones, and skips.",
    "console.read.rates.list_datasets", "console.read.rates.show_prompt", columns=_columns("""
        *dataset       text    its name
        *prompts       number  prompts with a counted group
        *mean          mean    mean share of right answers per prompt
        *always        number  prompts whose counted answers are all correct
        *between       number  prompts with correct and wrong answers
        *never         number  prompts without a correct answer
        *skipped_easy  number  prompts skipped because they are too easy
        *skipped_hard  number  prompts skipped because they are too hard
    """))  # fmt: skip

PAYLOADS = Resource(
    "payload servers", ("name",), "Payload servers.",
    "List servers with their state, memory, and whether they answer.", "console.read.parts.list_servers",
    columns=_columns("""
        *name     text    its name, which samples record
        *state    text    live, draining (only read), drained (empty) or lost
        *url      text    its address
        *used_mb  number  memory or disk in use, MiB
        *max_mb   number  its limit, MiB
        *answers  text    yes, or why it does not answer
    """))  # fmt: skip

NEXT = Resource(
    "next jobs", ("job",), columns=_columns("""
        *job          text    id of the job
        *lane         text    its lane
        *place        number  its place in that lane
        *min_version  number  an engine needs at least this version to start it
        *attempts     number  failed attempts
        *crashes      number  engines that crashed on it
        committed     number  its committed samples
        *n            number  the samples that it is asked for
        *prompt       text    its prompt
        *blocked_by   text    why no engine may start it now
    """))  # fmt: skip

PROCESSES = Resource(
    "processes", ("name",), columns=_columns("""
        *name    text    its name
        *kind    text    engine, router or worker
        *host    text    its machine
        *state   text    running, or why it is not
        *pid     number  its pid
        *starts  number  how often it was started
        *why     text    why it does not run
    """))  # fmt: skip

SAMPLES = Resource(
    "samples", ("id",), "Samples: prompts, answers, rewards, and what became of them.", columns=_columns("""
        *id             text     its id: DATASET/EPOCH/LINE/K
        *reward         number   its reward
        *oldest         number   oldest version of its generated tokens
        *newest         number   newest version of them
        *num_generated  number   generated tokens
        *fate           text     what became of it: trained, masked, filtered, dropped, ...; nothing while that is open
        *reason         text     why; of an open one the state of its job
        *prompt         excerpt  its prompt
        *answer         excerpt  its answer
    """))  # fmt: skip

EVALS = Resource(
    "evaluation", ("dataset", "version"), "Evaluation: scores and answers of held-out prompts over versions.",
    columns=_columns("""
        *dataset       text    name of the dataset
        *version       number  the version that was asked for
        *mean_version  mean    mean version of the generated tokens
        *oldest        number  oldest version of them
        *newest        number  newest version of them
        *asked_share   share   part of the tokens that the requested version generated
        *prompts       number  evaluated prompts
        *answers       number  their answers
        *reward_mean   mean    mean reward
        *reward_min    mean    lowest reward
        *reward_max    mean    highest reward
        *pass_at       by_k    k: chance that one of k answers to a prompt is right
    """))  # fmt: skip

CATEGORIES = Resource(
    "evaluation", ("dataset", "version", "category"), columns=_columns("""
        *dataset      text    name of the dataset
        *version      number  the version that was asked for
        *category     text    category of the prompts (data.eval's category_key)
        *prompts      number  evaluated prompts
        *answers      number  their answers
        *reward_mean  mean    mean reward
        *pass_at      by_k    k: chance that one of k answers to a prompt is right
        *majority_at  by_k    k: reward of the most frequent of k answers
    """))  # fmt: skip

LANES = Resource(
    "lanes", ("lane",), read="console.read.lanes.list_lanes", columns=_columns("""
        *lane      text     suspect (engines crashed on its jobs), resume (interrupted samples), eval, score or train
        *queued    number   jobs that wait for a worker
        *leased    number   jobs that a worker has
        *ready     number   complete groups that a batch may still take
        *oldest_s  seconds  how long its next job has been queued
        *paused    text     whether nothing is leased from it (`penstock pause`)
    """))  # fmt: skip

VERIFIERS = Resource(
    "verifiers", ("name",), columns=_columns("""
        *name    text     its name
        *host    text     its machine
        *state   text     what it does
        *checks  number   rewards that it has computed
        *killed  number   computations that it had to kill
        *age_s   seconds  time since its last heartbeat
    """))  # fmt: skip

CHECKSUMS = Resource(
    "engines", ("url",), columns=_columns("""
        *worker    text       its worker
        *url       text       its address
        *version   number     version of its weights
        *checksum  text       checksum of its weights
        *why       last_line  why it gave none
    """))  # fmt: skip

TRIED = Resource(
    "tried", ("job",), columns=_columns("""
        job             text     id of the job
        *prompt         excerpt  its prompt
        *answer         excerpt  the answer
        *reward         number   its reward, unless it failed
        *reward_info    pairs    further values of the reward
        *num_generated  number   generated tokens
        num_turns       number   turns of the policy
        *finish_reason  text     why the answer ended
        *generate_s     seconds  time to generate it
        *reward_s       seconds  time of the reward
        error           text     why it failed
    """))  # fmt: skip

SCORED = Resource(
    "scored", ("id",), columns=_columns("""
        *id        text     id of the sample
        *prompt    excerpt  its prompt, if it was given as text
        *response  excerpt  its answer
        *label     excerpt  its label
        *then      number   its recorded reward
        *now       number   its new reward, unless that failed
        *failure   text     name of the failure
        *info      pairs    further values of the reward
        *seconds   seconds  time of the reward
        error      text     the failure in a sentence
        differs    text     whether the new reward differs from the recorded one
    """))  # fmt: skip

WAITS = Resource(
    "waits", ("who",), read="console.read.parts.list_waits", columns=_columns("""
        *who      text     the part that waits
        *since_s  seconds  for how long
        *what     text     what it waits for (`penstock why` follows it to its cause)
    """))  # fmt: skip

#: By the word of the command line. Resources without one are tables of other commands.
RESOURCES: Mapping[str, Resource] = {
    "jobs": JOBS, "dead": DEAD, "buffer": GROUPS, "workers": WORKERS, "trainers": TRAINERS, "subs": SUBS,
    "weights": WEIGHTS, "data": DATA, "payloads": PAYLOADS,
}  # fmt: skip
#: By the word of an address of the page.
LISTS: Mapping[str, Resource] = {**RESOURCES, "groups": GROUPS, "lanes": LANES, "waits": WAITS}


def cells(columns: Sequence[Column], rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells of rows as text."""
    return [{one.name: one.cell(row) for one in columns} for row in rows]
