"""The hooks make operations of the verbs as they are, and only of what was really answered."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.records.keys import Keys
from tests.chaos.checks import leftovers
from tests.chaos.parts.policy import write_policy
from tests.chaos.places import RECORDED, ROOT
from tests.chaos.recording import contents, hooks
from tests.chaos.recording.history import History, read

PROLOGUE = """
from penstock.protocol import scripts
from penstock.records.keys import Keys
from penstock.records.job import Job
from penstock.records.manifest import Manifest, Row
from penstock.records.publication import Publication
from penstock.records.sample_meta import SampleMeta
keys, lead = Keys("r"), scripts.Leadership(1, "t")
"""


def recorded(tmp_path: Path, code: str) -> History:
    """The history of a process that does this, started as those of a run are."""
    environment = os.environ | {"PYTHONPATH": str(RECORDED), "CHAOS_HISTORY": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROLOGUE + code], cwd=ROOT, env=environment, timeout=60, check=True)
    return read(tmp_path)


@pytest.mark.parametrize(("module", "name"), [*hooks.VERBS, *hooks.STEPS, hooks.RESENT])
def test_what_is_hooked_is_there(module: str, name: str) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)

    assert inspect.isfunction(found)


def test_an_admission_names_what_was_acknowledged(tmp_path: Path) -> None:
    code = """
jobs = [(Job(id=f"d/0/{i}", n=2, prompt="p"), b"body") for i in range(3)]
how = {"lane": "train", "source": "train", "position": 0, "model": "m", "gate": None}
scripts.admit(keys, jobs, **how).parse([b"ok", 2, b"2"])
scripts.admit(keys, jobs, **how).parse([b"closed", 0, b"2", 0])
scripts.admit(keys, jobs, **how)
"""

    told, refused, lost = recorded(tmp_path, code).of("admit")

    assert told.facts["jobs"] == [["d/0/0", 2], ["d/0/1", 2], ["d/0/2", 2]]
    assert (told.outcome, told.answer) == ("yes", {"jobs": ["d/0/0", "d/0/1"]})
    assert refused.outcome == "no"
    assert lost.outcome == "unknown"


def test_a_lease_and_a_commit_carry_the_token_and_the_versions(tmp_path: Path) -> None:
    code = """
job = Job(id="d/0/1", n=2, prompt="p")
row = [b"train", b"d/0/1", b"tok", 0, b"body", 1, 0, [], 0]
scripts.lease(keys, "w", "base", most=1, version=3).parse([row])
meta = SampleMeta(1, "tok", "s", 7, 8, 9, 4, 5, 1.0, [[2, 1], [3, 4]], 2, 3, 0.5, "ok", "stop")
scripts.commit(keys, "d/0/1", "tok", iter([(1, 2, meta.to_bytes())])).parse([b"ok", 1, 0, 0])
"""

    history = recorded(tmp_path, code)

    (lease,), (commit,) = history.of("lease"), history.of("commit")
    assert lease.facts == {"worker": "w", "version": 3, "highest": 3}
    assert lease.answer == {"jobs": [["d/0/1", "tok", 1, [], 0]]}
    named = {"job": "d/0/1", "token": "tok", "samples": [[1, [2, 3]]], "servers": ["s"]}
    assert commit.facts == named | {"loss": [[[2, 1], [3, 4]]], "generated": [[5, 1]]}
    assert (commit.outcome, commit.answer) == ("yes", {"new": 1, "again": 0, "taken": 0})


def test_a_cut_and_a_publication_are_read_from_their_records(tmp_path: Path) -> None:
    code = """
row = Row("d/0/1", 0, "tok", "s", 1, 2, 3, 1, 2, 2, 4, 5, 4, 0.0, "ok")
manifest = Manifest("actor", 7, 6, 3, "mask", "async", 3, [row], 2, 1, 1, 1, 2, 2.0)
scripts.cut(
    keys, lead, "actor", revision=1, n=7, manifest=manifest.to_bytes(), digest="dg", consumes=1, model="m", version=6,
    oldest_allowed=-1, jobs=["d/0/1"],
).parse([b"cut"])
one = Publication("m", 8, "disk", "/w", index="gone", through=7)
how = {"owner": "o", "gen": 2, "model": "m", "version": 8, "through": 7, "step": 7, "record": one.to_bytes()}
scripts.publish(keys, "actor", **how).parse([b"published", 8])
"""

    history = recorded(tmp_path, code)

    (cut,), (publish,) = history.of("cut"), history.of("publish")
    assert cut.outcome == publish.outcome == "yes"
    assert cut.facts["rows"] == [["d/0/1", 0, "tok"]]
    assert (cut.facts["train_version"], cut.facts["bound"], cut.facts["mask_below"]) == (6, 3, 3)
    assert (cut.facts["mode"], cut.facts["on_expiry"]) == ("async", "mask")
    about = {"reward": 0.0, "masked": False, "lost": False, "newest": 5, "status": "ok"}
    assert cut.facts["scored"] == [["d/0/1", 0, 2, about]]
    assert cut.facts["counts"] == {"loss_tokens": 2, "samples": 1, "groups": 1}
    assert publish.facts["weights"] == "", "the folder has no such index"


def test_a_copy_its_announcement_and_its_folder_have_one_name_and_other_weights_another(
    tmp_path: Path,
) -> None:
    """Whichever of them is asked, in memory or on the disk."""
    write_policy(model := tmp_path / "model")
    code = f"""
import contextlib, pathlib
from types import SimpleNamespace
from safetensors.torch import load_file
from penstock.consumers.weights.checkpoint_writer import CheckpointWriter
from penstock.consumers.weights.write import write_weights
from penstock.consumers.weights.sources import as_source
from penstock.records.publication import Whole
model = pathlib.Path({str(model)!r})
config = SimpleNamespace(model=SimpleNamespace(path=str(model)))
writer = CheckpointWriter(config, None, None)
weights = load_file(model / "model.safetensors")
for version in (1, 2):
    copy = writer.copy(as_source(weights))
    one = Publication("m", version, "disk", "", through=version, layout=copy.layout_digest)
    how = dict(owner="o", gen=2, model="m", version=version, through=version, step=1, record=one.to_bytes())
    scripts.publish(keys, "actor", **how).parse([b"published", version])
    written = write_weights(copy, model, {str(tmp_path / "weights")!r}, version)
    told = Whole(version, str(written.path), written.index_digest)
    scripts.whole(keys, "actor", owner="o", gen=2, model="m", told=told).parse(b"whole")
    next(iter(weights.values())).add_(1)
"""

    history = recorded(tmp_path, code)

    copies, folders = history.of("copy"), history.of("whole")
    names = [one.answer["weights"] for one in copies]
    assert len(set(names)) == 2
    assert [one.facts["weights"] for one in history.of("publish")] == names
    assert [(one.outcome, one.facts["weights"]) for one in folders] == [("yes", name) for name in names]
    assert [contents.of_files(tmp_path / "weights" / f"v{version:08d}") for version in (1, 2)] == names


def test_the_budget_of_a_job_is_recorded_when_its_record_is_read(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace as Some
from penstock.workers.jobs.sampling import sampling_for
rollout = Some(sampling={"max_new_tokens": 24, "temperature": 1.0}, eval_sampling={})
sampling_for(Job(id="d/0/1", n=2, prompt="p", sampling={"max_new_tokens": 7}), rollout)
"""

    (sampling,) = recorded(tmp_path, code).of("sampling")

    assert (sampling.facts, sampling.answer) == ({"job": "d/0/1"}, {"max_new_tokens": 7})


def test_a_call_during_which_the_connection_was_lost_says_so(tmp_path: Path) -> None:
    code = """
import redis
from penstock.redis.control import until_answered
call = scripts.commit_batch(keys, "actor", owner="o", gen=1, n=3, digest="d", rank=1, ranks=2)
for answers in ([redis.ConnectionError("lost"), [b"already", 3, b""]], [[b"waiting", 3, b"01"]]):
    answers = iter(answers)
    def send():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return call.parse(answer)
    until_answered(send, "redis://x")
    call = scripts.commit_batch(keys, "actor", owner="o", gen=1, n=4, digest="e", rank=1, ranks=2)
"""

    lost, answered, _ = recorded(tmp_path, code).of("commit_batch")

    assert (lost.outcome, lost.answer) == ("yes", {"said": "already", "resent": True})
    assert answered.answer == {"said": "waiting"}
    assert (lost.facts["owner"], lost.facts["rank"], lost.facts["ranks"]) == ("o", 1, 2)


def test_a_verb_that_raises_was_refused(tmp_path: Path) -> None:
    code = """
import contextlib
from penstock.errors import LeadershipLost
with contextlib.suppress(LeadershipLost):
    scripts.drop(keys, lead, "d/0/1").parse(-1)
"""

    (drop,) = recorded(tmp_path, code).of("dispose")

    assert drop.outcome == "no"
    assert "LeadershipLost" in drop.answer["why"]


def test_a_refusal_after_a_lost_reply_is_unknown(tmp_path: Path) -> None:
    code = """
import redis
from penstock.redis.control import until_answered
answers = iter([redis.ConnectionError("lost"), [b"lost", 0, 0, 0]])
call = scripts.commit(keys, "d/0/1", "tok", [])
def send():
    answer = next(answers)
    if isinstance(answer, Exception):
        raise answer
    return call.parse(answer)
assert until_answered(send, "redis://x").outcome == "lost"
"""

    (commit,) = recorded(tmp_path, code).of("commit")

    assert commit.outcome == "unknown"


def test_without_a_folder_nothing_is_hooked() -> None:
    code = PROLOGUE + "assert not hasattr(scripts.admit, '__wrapped__')"
    environment = {name: value for name, value in os.environ.items() if name != "CHAOS_HISTORY"}

    subprocess.run(
        [sys.executable, "-c", code], env=environment | {"PYTHONPATH": str(RECORDED)}, cwd=ROOT, timeout=60, check=True
    )


def test_a_hook_of_a_module_that_is_loaded_is_refused(tmp_path: Path) -> None:
    code = """
from penstock.records.keys import Keys
from tests.chaos.recording import contents, hooks
from tests.chaos.checks import leftovers
from tests.chaos.recording.recorder import Recorder
import pathlib
hooks.install(Recorder(pathlib.Path("."), "late"))
"""

    done = subprocess.run([sys.executable, "-c", PROLOGUE + code], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert "is loaded already" in done.stderr


def test_a_trainer_that_delivers_trains_and_goes_back_is_recorded(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace as Some
from penstock.consumers.session import Session
from penstock.consumers.batch.stream import Stream
from penstock.consumers.subscription.progress import Progress
seat = Some(role="", rank=1, dp_rank=1, dp_size=2, drives=False)
subscriber = Some(name="actor", seat=seat, gen=4, owner="o")
rows = [Some(job="d/0/1", k=0), Some(job="d/0/1", k=1)]
batch = Some(manifest=Some(sub="actor"), n=3, digest="dg", all_rows=rows, rows=rows[1:], train_version=2)
Stream.hand_out(Some(_subscriber=subscriber, _prefetcher=Some(depth=0)), batch)
progress = Some(commit=lambda n, digest: None)
Session.commit(
    Some(
        subscriber=subscriber, name="actor", progress=progress, publishes=False, clock=Some(see=print), _exporter=None,
        steps=Some(commit=print),
        _tell=print,
    ),
    batch,
)
Progress.go_back(Some(_subscriber=subscriber), 2)
"""

    history = recorded(tmp_path, code)

    (deliver,), (train,), (restore,) = history.of("deliver"), history.of("train"), history.of("restore")
    assert deliver.facts == train.facts
    assert (train.facts["n"], train.facts["jobs"], train.facts["rows"]) == (3, ["d/0/1"], [["d/0/1", 1]])
    assert (train.facts["share"], train.facts["shares"]) == (1, 2)
    assert (restore.facts["n"], restore.facts["rank"], restore.facts["gen"]) == (2, 1, 4)
    assert {deliver.outcome, train.outcome, restore.outcome} == {"yes"}


def test_the_checker_knows_every_key_of_a_run() -> None:
    keys = Keys("r")
    names = [name for name in dir(Keys) if not name.startswith("_") and name not in ("run", "prefix", "of")]
    kinds = set()
    for name in names:
        member = getattr(keys, name)
        key = member(*["x"] * len(inspect.signature(member).parameters)) if callable(member) else member
        if isinstance(key, str) and key.startswith(keys.prefix):
            kinds.add(key.removeprefix(keys.prefix).partition(":")[0])

    known = leftovers.OF_THE_RUN | leftovers.OF_A_SUBSCRIPTION | leftovers.OF_A_JOB | leftovers.MUST_EXPIRE
    assert len(kinds) > 40
    assert kinds - known == set()
