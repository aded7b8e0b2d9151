"""Every verb on what is not there, on names that nobody would give, and on a Redis that is away: one sentence each."""

from pathlib import Path

from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration.test_inspection import Cli, cli
from tests.unit.console.cli.test_verbs import NO_RESULT, NO_RUN, VERBS

__all__ = ["cli"]

#: What moves a terminal's cursor, turns the direction of writing, and is more than one line.
HOSTILE = "\x1b[2J\u202e\r\nx"

#: Verb -> what it is given that is not there, and words of what it says then.
UNKNOWN: dict[str, tuple[list[str], str]] = {
    "jobs show": (["d/0/99"], "There is no job 'd/0/99'"),
    "jobs cancel": (["d/0/99"], "there is no such job"),
    "dead show": (["d/0/0"], "Job 'd/0/0' is not a dead letter"),
    "dead requeue": (["d/0/99"], "Job 'd/0/99' is not a dead letter"),
    "dead purge": (["d/0/99", "--yes"], "Job 'd/0/99' is not a dead letter"),
    "workers show": (["w9"], "There is no worker 'w9'"),
    "samples show": (["d/0/99/0"], "d/0/99/0"),
    "eval show": (["heldout/9"], "no answer to line 9"),
    "subs drop": (["nobody"], "There is no subscription 'nobody'"),
    "subs set": (["actor", "siez=3"], "siez"),
    "payloads drain": (["p9"], "p9"),
    "payloads lose": (["p9"], "p9"),
    "payloads add": (["p9", "redis://127.0.0.1:1/0"], "No Redis answers"),
    "fleet scale": (["1"], "No fleet of run"),
    "fleet engines": (["w9"], "There is no worker 'w9' with a router"),
    "fleet ls": ([], "No fleet of run"),
    "pause": (["fast"], "fast"),
    "resume": (["fast"], "fast"),
    "peek": (["fast"], "fast"),
    "trace": (["d/0/99"], "d/0/99"),
    "export": (["/dev/null/out.jsonl"], "/dev/null"),
    "engines offload": (["--tags", "disk"], "There is no memory ['disk'] to offload"),
    "engines onload": (["--tags", "disk"], "There is no memory ['disk'] to offload"),
    "metrics discovery": (["--out", "file.txt"], "Prometheus reads files that end in .json"),
}
#: What they are given where that is not in question.
NEEDS = {verb: arguments for verb, (arguments, _) in UNKNOWN.items()} | {
    "pause": ["train"],
    "resume": ["train"],
    "peek": [],
    "data show": ["d/0"],
    "engines offload": [],
    "engines onload": [],
    "metrics discovery": [],
    "payloads add": ["p9", "redis://127.0.0.1:1/0"],
    "subs set": ["actor", "size=3"],
}
#: `reward try` may be told a run or not, and two verbs make what a run needs: they have tests of their own.
NOT_HERE = NO_RESULT | NO_RUN | {"reward try", "init", "engine install"}
OF_A_RUN = sorted(set(VERBS) - NOT_HERE)


#: What a history says of itself before, in a line of its own.
NOTES = ("has no history in",)


def refused(verb: str, told: tuple[int, str, str], said: str = "") -> None:
    """It ended by one sentence that holds ``said`` and nothing that a terminal obeys."""
    code, out, err = told
    lines = [line for line in err.splitlines() if not any(note in line for note in NOTES)]
    assert code in (1, 2), (verb, told)
    assert said in out + err, (verb, told)
    assert len(lines) <= 1, (verb, told)
    assert "Traceback" not in out + err, (verb, told)
    assert not {"\x1b", "\u202e", "\r"} & set(out + err), (verb, told)


def test_what_is_not_there_is_a_sentence(cli: Cli) -> None:
    for verb, (arguments, said) in UNKNOWN.items():
        refused(verb, cli(*verb.split(), *arguments), said)


def test_a_hostile_name_is_refused_and_shown_harmlessly(cli: Cli) -> None:
    for verb in (verb for verb, (given, _) in UNKNOWN.items() if given and verb != "export"):
        given = [one for one in UNKNOWN[verb][0] if one != "--yes"]
        refused(verb, cli(*verb.split(), *given[:-1], HOSTILE))


def test_another_run_and_a_redis_that_is_away_are_a_sentence(
    cli: Cli, redis_server: RedisServer, keys: Keys, tmp_path: Path
) -> None:
    cli.target = []
    there, away = ["--directory", str(tmp_path)], ["--redis", "redis://:hush@127.0.0.1:1/0"]
    for verb in sorted(set(OF_A_RUN) - {"doctor"}):  # that one tells it among other findings
        words = [*verb.split(), *NEEDS.get(verb, [])]
        if verb != "payloads add":  # it asks the new server first
            nobody = cli(*words, "--run", "nobody", "--redis", redis_server.url, *there)
            refused(verb, nobody, "knows no run 'nobody'")
            refused(verb, cli(*words, "--run", keys.run, *away, *there), "No Redis answers at redis://:***@127.0.0.1:1")
            refused(verb, cli(*words, *there), "There is no run under")
        for run in (HOSTILE, "a/../b", "x" * 1000):
            refused(verb, cli(*words, "--run", run, "--redis", redis_server.url, *there))
    assert list(tmp_path.iterdir()) == []
