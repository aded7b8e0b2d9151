"""Select what an engine loads next: a pure function of a view, which reads nothing and has no clock.

The rules are in ``select_version``, in their order; docs/internals/weights.md has them as a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import TypeAlias

from penstock.records.cause import Cause
from penstock.records.publication import Publication, publication_id
from penstock.records.worker_causes import CohortRunning, EvaluationRunning, WeightsUnwritten


class Purpose(StrEnum):
    """Why a version is selected."""

    #: The engine runs, and may be behind.
    RUN = auto()
    #: It is about to be started.
    START = auto()
    #: It runs without weights: the memory for them is requested back.
    MEMORY = auto()


@dataclass(frozen=True, slots=True)
class EngineView:
    """The state of one engine."""

    version: int = -1
    rev: int = 0
    #: Memory that it has released: weights, cuda_graph, kv_cache.
    offloaded: frozenset[str] = frozenset()
    is_lost: bool = False
    #: Version of which it received some weights and not all; -1: none. It generates nothing meanwhile.
    partial: int = -1

    @property
    def id(self) -> str:
        """``VERSION-REV`` of its weights; '' for none."""
        return publication_id(self.version, self.rev) if self.version >= 0 else ""


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """Another worker that generates: its version, and later ones that it is about to load."""

    version: int
    loading: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Everything that a selection depends on."""

    purpose: Purpose
    engine: EngineView
    #: The publication that the engine has, or had when it was lost; with its folder if that exists.
    loaded: Publication | None = None
    #: The newest publication and those before it, newest first; each with its folder if that exists.
    published: tuple[Publication, ...] = ()
    #: Whether the trainer may send the newest to this engine.
    is_sendable: bool = False
    #: Publications (VERSION-REV) that engines crashed on, and those that this one failed to load.
    set_aside: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    #: one_step: a cohort has one version on all engines.
    drains: bool = False
    #: Most versions that an engine may be behind a newest without a folder; 0 unless mode is async.
    bound: int = 0
    #: Versions with jobs that are not done, and other engines that generate (one_step).
    cohorts: tuple[int, ...] = ()
    others: tuple[OtherEngine, ...] = ()
    #: Unfinished jobs of an evaluation that is pinned to the engine's version; 0 if their lane is paused.
    evaluating: int = 0
    #: Whether the time to complete partly received weights is over.
    is_late: bool = False

    @property
    def newest(self) -> Publication | None:
        """The newest publication."""
        return self.published[0] if self.published else None


@dataclass(frozen=True, slots=True)
class Load:
    """Load these weights: from the trainer, over the network or shared memory, or from a folder on this machine."""

    publication: Publication
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take the version of a publication whose weights the engine has."""

    publication: Publication


@dataclass(frozen=True, slots=True)
class Wait:
    """Load nothing yet."""

    cause: Cause
    #: The publication that is loaded next if nothing changes; None: one without a folder.
    target: Publication | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """Load nothing; start without weights."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Replace the engine by a new one."""

    reason: str


Decision: TypeAlias = Load | Adopt | Wait | Keep | Restart


def select_version(view: View) -> Decision:
    """Return what to do; the first rule that applies decides."""
    engine, newest = view.engine, view.newest
    # The supervisor starts a lost engine, and there is nothing to load before the first publication.
    if newest is None or (engine.is_lost and view.purpose is not Purpose.START):
        return Keep()
    # An engine that starts needs weights that are complete now (I9).
    if view.purpose is Purpose.START:
        return next((Load(one) for one in _to_start(view, newest)), Keep())
    # Engines crash on these weights.
    if engine.id in view.set_aside:
        return Restart(f"publication {engine.id} was set aside")
    # Mixed weights generate nothing; a collective cannot be joined again, a folder can be loaded.
    if engine.partial >= 0:
        return _complete(view)
    # Weights in released memory are loaded when it is requested back; one_step needs all memory to end its cohort.
    if view.purpose is Purpose.RUN and not _is_behind(view, newest):
        return Keep()
    # Weights cannot come back to this engine, but to its successor.
    if newest.id in view.set_aside:
        return Restart(f"publication {newest.id} was set aside while weights were offloaded")
    target = _target(view, newest)
    if target is None:
        return Wait(WeightsUnwritten(newest.version))
    if (cause := _blocked_by(view, newest, target)) is not None:
        return Wait(cause, target)
    # The same weights under another number: a tick, or the first publication after a restore.
    if _is_same(view, newest, target):
        return Adopt(target)
    # A send needs no disk. Trainers send the newest alone.
    return Load(target, is_sent=view.is_sendable and target is newest)


def _is_behind(view: View, newest: Publication) -> bool:
    engine = view.engine
    if "weights" in engine.offloaded or (engine.offloaded and view.drains) or newest.id in view.set_aside:
        return False
    return (engine.version, engine.rev) < (newest.version, newest.rev)


def _target(view: View, newest: Publication) -> Publication | None:
    """Return the publication to load as soon as nothing blocks it; None: the newest, once it has a folder."""
    # T5: a cohort is generated with one version, though a later one may be available.
    if (first := _of_oldest_cohort(view, newest)) is not None:
        return first
    if newest.is_whole or (view.is_sendable and view.purpose is Purpose.RUN):
        return newest
    if view.purpose is Purpose.MEMORY:
        return None
    # async: the latest that has a folder, or a disk slower than a step would leave the engine ever further behind.
    near = (one for one in _usable(view, newest) if one.version > view.engine.version)
    return next((one for one in near if _is_near(view, newest, one)), None)


def _blocked_by(view: View, newest: Publication, target: Publication) -> Cause | None:
    """Return what has to end before ``target`` is loaded."""
    engine = view.engine
    # An engine without all of its memory generates nothing; tokens of an abandoned version are not trained on (T1).
    if engine.offloaded or newest.abandons(engine.version):
        return None
    # T5: cohorts before it end first, those of later versions only while another engine may generate them.
    if running := _running(view, newest, target.version, engine.version):
        return CohortRunning(min(running), target.version)
    # T18: an evaluation has one version.
    if view.evaluating:
        return EvaluationRunning(engine.version, view.evaluating, target.version)
    return None


def _is_same(view: View, newest: Publication, target: Publication) -> bool:
    """Return whether the engine has the weights of ``target``, by the digests of their indexes, and may go on."""
    engine, loaded = view.engine, view.loaded
    if loaded is None or loaded.id != engine.id or engine.offloaded or newest.abandons(engine.version):
        return False
    return target.version > engine.version and target.index == loaded.index != ""


def _complete(view: View) -> Decision:
    """Complete weights that were received in part: by the latest folder of that version or a later one."""
    newest, partial = view.newest, view.engine.partial
    assert newest is not None
    for one in view.published:
        if one.version >= partial and _has_weights(newest, one, view.set_aside):
            return Load(one)
    if view.is_late:
        return Restart(f"the engine's weights are mixed (version {partial} was sent in part), and no folder was found")
    return Wait(WeightsUnwritten(partial))


def _to_start(view: View, newest: Publication) -> list[Publication]:
    """Return the publications that an engine may start with, best first.

    These are the version of the oldest cohort (one_step), the newest, the one the engine had, and, if the newest will
    not do, earlier ones: within the bound if the newest has no folder yet.
    """
    is_aside = newest.id in view.set_aside
    wanted = [_of_oldest_cohort(view, newest), newest, view.loaded]
    if is_aside or not newest.is_whole:
        wanted += view.published
    out = view.set_aside | view.failed
    found = [one for one in wanted if one is not None and _has_weights(newest, one, out)]
    if not is_aside and not newest.is_whole:
        found = [one for one in found if one is wanted[0] or _is_near(view, newest, one)]
    # T5: none after a cohort that another engine generates.
    return [one for one in found if not _running(view, newest, one.version)]


def _of_oldest_cohort(view: View, newest: Publication) -> Publication | None:
    """Return the earlier version to load first, for its cohort (one_step, T5); None if no folder has it."""
    if not view.drains:
        return None
    engine = view.engine
    oldest = min(view.cohorts, default=newest.version)
    if engine.version < 0 or "weights" in engine.offloaded:
        had = view.loaded.version if view.loaded is not None and view.purpose is Purpose.START else -1
        oldest = max(oldest, engine.version, had)  # never back behind what it had
    elif oldest <= engine.version:
        return None
    found = _earliest(view, newest, oldest)
    if found is None:
        return None
    # Others may have begun the cohort with a later version, as its own had no folder then.
    others = [one.version for one in view.others]
    begun = max((one for one in others if one <= newest.version and not newest.abandons(one)), default=-1)
    return found if begun <= found.version else _earliest(view, newest, begun)


def _earliest(view: View, newest: Publication, lowest: int) -> Publication | None:
    return next((one for one in reversed(_usable(view, newest)) if one.version >= lowest), None)


def _usable(view: View, newest: Publication) -> Sequence[Publication]:
    """Return the publications of versions before the newest that may be loaded from a folder now, latest first."""
    out = view.set_aside | view.failed
    return [one for one in view.published if one.version < newest.version and _has_weights(newest, one, out)]


def _has_weights(newest: Publication, one: Publication, out: frozenset[str]) -> bool:
    """Return whether a publication has a folder, and is neither abandoned nor in ``out``."""
    return one.is_whole and one.id not in out and not newest.abandons(one.version)


def _is_near(view: View, newest: Publication, one: Publication) -> bool:
    return 0 < newest.version - one.version <= view.bound


def _running(view: View, newest: Publication, before: int, own: int = -1) -> list[int]:
    """Return the cohorts before a version that an engine of version ``own``, or another, may generate (one_step)."""
    if not view.drains:
        return []
    out = {id_.partition("-")[0] for id_ in view.set_aside | view.failed}
    others = [one.version for one in view.others]
    others += [v for one in view.others for v in one.loading if v > one.version and str(v) not in out]
    last = max([own, *(version for version in others if version < before and not newest.abandons(version))])
    return [cohort for cohort in view.cohorts if cohort < before and cohort <= last]
