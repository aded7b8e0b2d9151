"""Which functions of penstock are recorded, and how: the one place that knows their names.

``VERBS`` build a ``Call`` and touch no network: the call is recorded where it is built, and its end where its answer is
read, on whichever way it was sent (Control, a client, a pipeline). ``STEPS`` do something themselves. Both are wrapped
when their module is loaded, in the process under test; penstock knows nothing of it.

A verb that is sent again after a lost reply may be refused because the first one was carried out. So a "no" that came
after this process lost a connection is recorded as unknown.
"""

import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.chaos.recording import contents
from tests.chaos.recording.recorder import NO, UNKNOWN, YES, Recorder

Facts = dict[str, Any]


@dataclass(frozen=True)
class Hook:
    """How an operation is made of a function's arguments and of what it returns."""

    op: str
    facts: Callable[[Facts], Facts]
    #: Outcome, and what the answer says.
    answer: Callable[[Facts, Any], tuple[str, Facts]] = lambda args, value: (YES if value else NO, {})


def _admitted(args: Facts, answer: Any) -> tuple[str, Facts]:
    if answer.outcome != "ok":
        return NO, {"why": answer.outcome}
    # Of these each was admitted now, or is live or done from before.
    taken = enumerate(args["jobs"][: answer.admitted])
    return YES, {"jobs": [job.id for at, (job, _) in taken if at not in answer.skipped]}


def _lease(args: Facts) -> Facts:
    highest = args["version"] if args["highest"] is None else args["highest"]
    return _take("worker", "version")(args) | {"highest": highest}


def _leased(args: Facts, answer: Any) -> tuple[str, Facts]:
    return (YES if answer else NO), {
        "jobs": [[one.job, one.token, one.attempts, sorted(one.committed), one.not_before] for one in answer]
    }


def _commit(args: Facts) -> Facts:
    from penstock.records.sample_meta import SampleMeta

    metas = [SampleMeta.from_bytes(record) for _, _, record in args["samples"]]
    samples = [[meta.k, [version for version, _ in meta.loss_by_version]] for meta in metas]
    named = {"job": args["job"], "token": args["token"], "samples": samples}
    named["servers"] = [meta.server for meta in metas]
    named["loss"] = [meta.loss_by_version for meta in metas]
    # Tokens and turns; a given answer is not generated.
    named["generated"] = [[meta.num_generated * (meta.status != "given"), meta.num_turns] for meta in metas]
    return named


def _committed(args: Facts, answer: Any) -> tuple[str, Facts]:
    counts = {"new": answer.new, "again": answer.again, "taken": answer.taken}
    return (NO if answer.outcome == "lost" else YES), counts


def _cut(args: Facts) -> Facts:
    from penstock.records.manifest import Manifest

    manifest = Manifest.from_bytes(args["manifest"], "a manifest")
    rows = [[row.job, row.k, row.token] for row in manifest.samples()]
    named = {name: args[name] for name in ("sub", "n", "digest", "model", "jobs")}
    of_manifest = ("train_version", "bound", "mode", "on_expiry", "mask_below", "mask_offpolicy", "mask_truncated")
    named["epoch"] = args["lead"].epoch
    of_row = ("reward", "masked", "lost", "newest", "status")
    named["scored"] = [
        [row.job, row.k, row.num_loss, {name: getattr(row, name) for name in of_row}] for row in manifest.samples()
    ]
    counts = {"loss_tokens": manifest.num_loss_tokens, "samples": manifest.num_samples, "groups": manifest.num_groups}
    named["counts"] = counts
    return named | {name: getattr(manifest, name) for name in of_manifest} | {"rows": rows}


def _defined(definition: Facts) -> Facts:
    return {name: str(definition[name]) for name in DEFINED if name in definition}


def _outcome(*good: str) -> Callable[[Facts, Any], tuple[str, Facts]]:
    def read(args: Facts, answer: Any) -> tuple[str, Facts]:
        return (YES if answer.outcome in good else NO), {"said": answer.outcome}

    return read


def _publication(args: Facts) -> Facts:
    from penstock.records.publication import Publication

    said = Publication.from_bytes(args["record"], "a publication")
    weights = contents.of_folder(said.path, said.index) if said.is_whole else _copied
    return _take("sub", "gen", "model", "version", "through", "step", "rev")(args) | {"weights": weights}


def _whole(args: Facts) -> Facts:
    told = args["told"]
    return _take("sub", "gen", "model")(args) | {
        "version": told.version,
        "weights": contents.of_folder(told.path, told.index),
    }


def _copy(args: Facts, copy: Any) -> tuple[str, Facts]:
    global _copied
    _copied = contents.of_tensors(copy.tensors({}))
    return YES, {"weights": _copied}


def _take(*names: str) -> Callable[[Facts], Facts]:
    return lambda args: {name: args[name] for name in names}


def _seat(subscriber: Any) -> Facts:
    seat = subscriber.seat
    acts = {"gen": subscriber.gen, "owner": subscriber.owner}
    return {
        "sub": subscriber.name,
        "role": seat.role,
        "rank": seat.rank,
        "share": seat.dp_rank,
        "shares": seat.dp_size,
    } | acts


def _batch(args: Facts) -> Facts:
    batch = args["batch"]
    jobs = list(dict.fromkeys(row.job for row in batch.all_rows))
    own = [[row.job, row.k] for row in batch.rows]
    holder = args["self"]
    seat = _seat(holder.subscriber if hasattr(holder, "subscriber") else holder._subscriber)
    return seat | {"sub": batch.manifest.sub, "n": batch.n, "digest": batch.digest, "jobs": jobs, "rows": own}


def _recorded(args: Facts) -> Facts:
    jobs = [job.decode() if isinstance(job, bytes) else job for job in args["jobs"]]
    return {"epoch": args["recording"].epoch, "jobs": jobs}


def _turn(args: Facts) -> Facts:
    from penstock.workers.jobs.episodes import can_resume

    sample = args["sample"]
    # Logprobs are stored as float32.
    drawn = repr((sample.tokens, sample.versions, array("f", sample.logprobs).tolist()))
    return {
        "sample": sample.id,
        "turn": sample.num_turns,
        "resumes": can_resume(args["environment"]),
        "digest": hashlib.sha256(drawn.encode()).hexdigest(),
        "versions": sorted(set(sample.versions) - {-1}),
    }


def _done(args: Facts, value: Any) -> tuple[str, Facts]:
    return YES, {}


#: What is recorded of a subscription.
DEFINED = ("driving", "unit", "share", "bound", "gb", "over", "roles", "lanes")

#: (module, function) -> how it is recorded.
VERBS: dict[tuple[str, str], Hook] = {
    ("penstock.protocol.scripts.producer", "admit"): Hook(
        "admit",
        lambda args: _take("lane", "source", "position")(args) | {"jobs": [[job.id, job.n] for job, _ in args["jobs"]]},
        _admitted,
    ),
    ("penstock.protocol.scripts.worker", "lease"): Hook("lease", _lease, _leased),
    ("penstock.protocol.scripts.worker", "commit"): Hook("commit", _commit, _committed),
    ("penstock.protocol.scripts.worker", "reward"): Hook(
        "reward", _take("job", "token"), lambda args, said: (YES if said == "ready" else NO, {"said": said})
    ),
    ("penstock.protocol.scripts.worker", "release"): Hook("release", _take("job", "token")),
    ("penstock.protocol.scripts.worker", "fail"): Hook(
        "fail", _take("job", "token", "reason"), lambda args, where: (NO if where == "lost" else YES, {"where": where})
    ),
    ("penstock.protocol.scripts.worker", "crash"): Hook(
        "crash",
        _take("job", "token", "publication"),
        lambda args, where: (NO if where == "lost" else YES, {"where": where}),
    ),
    ("penstock.protocol.scripts.leader", "cut"): Hook("cut", _cut, _outcome("cut", "already")),
    ("penstock.protocol.scripts.leader", "dispose"): Hook(
        "dispose",
        lambda args: _take("sub", "reason")(args) | {"jobs": list(args["jobs"]), "epoch": args["lead"].epoch},
        lambda args, number: (YES, {"count": number}),
    ),
    ("penstock.protocol.scripts.leader", "judge"): Hook(
        "dispose",
        lambda args: {"sub": args["sub"], "reason": "filtered", "jobs": [g.job for g in args["groups"] if g.reason]},
        lambda args, number: (YES, {"count": number}),
    ),
    ("penstock.protocol.scripts.leader", "drop"): Hook(
        "dispose", lambda args: {"sub": "", "reason": "timed_out", "jobs": [args["job"]]}
    ),
    ("penstock.protocol.scripts.leader", "park"): Hook("park", _take("sub"), _outcome("parked")),
    ("penstock.protocol.scripts.leader", "seal"): Hook(
        "seal",
        lambda args: _take("subs", "jobs")(args) | {"evict": sorted(args["evict"]), "epoch": args["lead"].epoch},
        lambda args, jobs: (NO, {}) if jobs is None else (YES, {"jobs": jobs}),
    ),
    ("penstock.protocol.scripts.leader", "grant"): Hook(
        "grant", _take("sub", "groups"), lambda args, owed: (YES if owed > 0 else NO, {"owed": owed})
    ),
    ("penstock.protocol.scripts.leader", "rolled_back"): Hook(
        "report", lambda args: {"seen": dict(args["seen"])}, lambda args, lost: (YES, {"counters": lost})
    ),
    ("penstock.protocol.scripts.operator", "record"): Hook(
        "record", lambda args: {}, lambda args, epoch: (YES if epoch else NO, {"epoch": epoch})
    ),
    ("penstock.protocol.scripts.operator", "recorded"): Hook(
        "recorded", _recorded, lambda args, count: (YES, {"count": count})
    ),
    ("penstock.protocol.scripts.operator", "requeue"): Hook("requeue", _take("job")),
    ("penstock.protocol.scripts.operator", "unsubscribe"): Hook("unsubscribe", _take("sub")),
    ("penstock.protocol.scripts.operator", "cancel"): Hook(
        "dispose",
        lambda args: {"sub": "", "reason": "cancelled", "jobs": [args["job"]]},
        lambda args, state: (NO if state in ("", "cut") else YES, {"said": state}),
    ),
    ("penstock.protocol.scripts.operator", "collect"): Hook(
        "dispose",
        lambda args: {"sub": "", "reason": "collected", "jobs": [args["job"]]},
        lambda args, said: (YES if said == "retired" else NO, {"said": said}),
    ),
    ("penstock.protocol.scripts.trainer", "subscribe"): Hook(
        "subscribe",
        lambda args: {"sub": args["sub"]} | _defined(args["definition"]),
        _done,
    ),
    ("penstock.protocol.scripts.trainer", "commit_batch"): Hook(
        "commit_batch",
        _take("sub", "owner", "gen", "n", "digest", "rank", "ranks", "role"),
        _outcome("committed", "waiting", "already"),
    ),
    ("penstock.protocol.scripts.trainer", "publish"): Hook(
        "publish", _publication, lambda args, clock: (YES, {"clock": clock})
    ),
    ("penstock.protocol.scripts.weights", "whole"): Hook(
        "whole", _whole, lambda args, said: (YES if said in ("whole", "already") else NO, {"said": said})
    ),
    ("penstock.protocol.scripts.trainer", "checkpointed"): Hook(
        "checkpoint", _take("sub", "gen", "n", "role"), lambda args, code: (YES if code > 0 else NO, {})
    ),
    ("penstock.protocol.scripts.trainer", "rewind"): Hook(
        "rewind",
        _take("sub", "gen", "n", "model"),
        lambda args, answer: (YES if answer.outcome == "rewound" else NO, {"gen": answer.gen}),
    ),
    ("penstock.protocol.scripts.trainer", "lost"): Hook(
        "report",
        lambda args: {"samples": [f"{job}/{k}" for job, k, _ in args["samples"]]},
        lambda args, new: (YES, {"samples": new}),
    ),
}  # fmt: skip

STEPS: dict[tuple[str, str], Hook] = {
    ("penstock.consumers.batch.stream", "Stream.hand_out"): Hook("deliver", _batch, _done),
    # A trainer says so once its weights have seen the batch.
    ("penstock.consumers.session", "Session.commit"): Hook("train", _batch, _done),
    # What is announced without a folder is what was copied last.
    ("penstock.consumers.weights.checkpoint_writer", "CheckpointWriter.copy"): Hook("copy", lambda args: {}, _copy),
    ("penstock.workers.jobs.sampling", "sampling_for"): Hook(
        "sampling",
        lambda args: {"job": args["job"].id},
        lambda args, sampling: (YES, {"max_new_tokens": int(sampling.get("max_new_tokens") or 0)}),
    ),
    ("penstock.workers.jobs.environments", "step"): Hook("turn", _turn, _done),
    ("penstock.consumers.subscription.progress", "Progress.go_back"): Hook(
        "restore", lambda args: _seat(args["self"]._subscriber) | {"n": args["n"]}, _done
    ),
}

#: Called before every further try of something whose reply was lost.
RESENT = ("penstock.redis.control", "_Patience.next_wait")

_losses = 0
#: What was copied last by this process, as contents.py names it; '' before the first.
_copied = ""
#: What records this process.
_installed: Recorder | None = None


def install(recorder: Recorder) -> None:
    """Record from now on: modules that are loaded, and those that will be. Blocks for none of them."""
    tables: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {}
    for wrap, hooks in ((record_verb, VERBS), (record_step, STEPS)):
        for (module, name), hook in hooks.items():
            tables.setdefault(module, []).append((name, functools.partial(wrap, recorder, hook)))
    tables.setdefault(RESENT[0], []).append((RESENT[1], _count_losses))
    for module in tables:
        if module in sys.modules:
            raise RuntimeError(f"{module} is loaded already, and others may hold its functions: install hooks first.")
    sys.meta_path.insert(0, _AfterLoading(tables))


def record_verb(recorder: Recorder, hook: Hook, verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb``, whose calls are recorded when they are built, and their answers when they are read."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def build(*args: Any, **kwargs: Any) -> Any:
        given = _arguments(signature, args, kwargs)
        call, before = verb(*given.args, **given.kwargs), _losses
        number = recorder.call(hook.op, hook.facts(given.arguments))

        def parse(answer: Any) -> Any:
            try:
                value = call.parse(answer)
            except Exception as exc:
                recorder.end(number, _sure(NO, before), {"why": repr(exc)[:200]})
                raise
            outcome, facts = hook.answer(given.arguments, value)
            resent = {"resent": True} if before != _losses else {}
            recorder.end(number, _sure(outcome, before), facts | resent)
            return value

        return replace(call, parse=parse)

    return build


def record_step(recorder: Recorder, hook: Hook, step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, recorded before and after; one that raises may have been done."""
    signature = inspect.signature(step)

    @functools.wraps(step)
    def do(*args: Any, **kwargs: Any) -> Any:
        given = _arguments(signature, args, kwargs)
        number = recorder.call(hook.op, hook.facts(given.arguments))
        try:
            value = step(*given.args, **given.kwargs)
        except BaseException as exc:
            recorder.end(number, UNKNOWN, {"why": repr(exc)[:200]})
            raise
        recorder.end(number, *hook.answer(given.arguments, value))
        return value

    return do


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """All arguments by name; what can be gone through only once is made a list, for both who need it."""
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    for name, value in given.arguments.items():
        if hasattr(value, "__next__"):
            given.arguments[name] = list(value)
    return given


def _sure(outcome: str, losses_before: int) -> str:
    return UNKNOWN if outcome == NO and losses_before != _losses else outcome


def _count_losses(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _losses
        _losses += 1
        return wait(*args, **kwargs)

    return counted


class _AfterLoading(importlib.abc.MetaPathFinder):
    """Wraps functions of a module as soon as it is loaded, before anybody can have taken them from it."""

    def __init__(self, tables: dict[str, list[tuple[str, Callable[[Any], Any]]]]) -> None:
        self._tables = tables

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wraps = self._tables.get(name)
        if wraps is None:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name}, which the recorder hooks, is not there: correct the table of hooks.")
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            for function, wrap in wraps:
                *owners, last = function.split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, last, wrap(getattr(owner, last)))

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def install_from_environment() -> None:
    """Install for the folder ``CHAOS_HISTORY``, where it is set; parts are named by their command."""
    global _installed
    if folder := os.environ.get("CHAOS_HISTORY"):
        _installed = Recorder(Path(folder), os.environ.get("CHAOS_WHO") or _own_name())
        install(_installed)


def rename(who: str) -> None:
    """This process, which was forked from one with hooks, is another part."""
    if _installed is not None:
        _installed.who = who


def _own_name() -> str:
    words = sys.orig_argv
    after = words.index("penstock.cli") + 1 if "penstock.cli" in words else len(words)
    return words[after] if after < len(words) and words[after].isidentifier() else "process"
