"""Programs that try to get out of a jail, to use a machine up, or to leave something behind: each kind, each user."""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.errors import ConfigError
from penstock.redis.server import RedisServer
from penstock.workers.rewards.jail import backends, detect
from penstock.workers.rewards.jail.backends import BACKENDS, NO_BACKEND, walls
from penstock.workers.rewards.jail.jail import Jail, JailError
from penstock.workers.rewards.jail.task import End, Task
from tests.integration.jails import LIMITS, TEST_S, Tried, bwrap_on_path, interpreter, need_kernel

SECRET = "a password in the environment of a worker"

#: Tries everything, and prints what it could do.
ESCAPES = """
import ctypes, json, os, signal, socket, sys
about = json.load(sys.stdin)
done = []

def tried(what, action):
    try:
        found = action()
    except BaseException:
        return
    if found is not None and found is not False:
        done.append([what, repr(found)[:200]])

libc = ctypes.CDLL(None)
def call(name, *arguments):
    return getattr(libc, name)(*arguments) == 0

for family, address in ((socket.AF_INET, ("127.0.0.1", about["port"])), (socket.AF_UNIX, about["socket"]),
                        (socket.AF_UNIX, about["abstract"])):
    def connect():
        with socket.socket(family) as one:
            one.settimeout(1)
            one.connect(address)
            return True
    tried(f"connected to {address}", connect)
for family in (16, 17, 38, 40):
    tried(f"socket of family {family}", lambda: socket.socket(family, socket.SOCK_RAW) or True)
tried("a name looked up", lambda: socket.getaddrinfo("example.org", 80))

tried("read a file", lambda: open(about["file"]).read())
tried("read /etc/shadow", lambda: open("/etc/shadow").read())
tried("read /etc/passwd", lambda: open("/etc/passwd").read())
tried("listed a folder", lambda: os.listdir(about["folder"]))
for path in (about["folder"] + "/left", "/usr/left", "/left", "/etc/left", "/dev/shm/left", "/var/tmp/left",
             "/usr/lib/left", "/home/left", "/root/left", "/run/left"):
    tried(f"wrote {path}", lambda: open(path, "w"))
tried("changed rights", lambda: os.chmod(about["file"], 0) is None)
tried("changed times", lambda: os.utime(about["file"], (0, 0)) is None)
tried("removed a file", lambda: os.remove(about["file"]) is None)
tried("renamed a file", lambda: os.rename(about["file"], about["file"] + ".left") is None)
tried("cut a file", lambda: os.truncate(about["file"], 0) is None)

tried("secret in its environment", lambda: [one for one in os.environ.values() if about["secret"] in one] or None)
def environments():
    return [one for one in os.listdir("/proc") if one.isdigit() and one != str(os.getpid())
            and open(f"/proc/{one}/environ", "rb").read()] or None
tried("read environments", environments)
tried("read an environment", lambda: open(f"/proc/{about['pid']}/environ", "rb").read())
tried("read a command line", lambda: open(f"/proc/{about['pid']}/cmdline", "rb").read())
tried("opened memory", lambda: open(f"/proc/{about['pid']}/mem", "rb") and True)
tried("read init's environment", lambda: open("/proc/1/environ", "rb").read() if os.getpid() != 1 else None)
tried("wrote a setting", lambda: open("/proc/sys/kernel/core_pattern", "w") and True)
tried("wrote a score", lambda: open("/proc/self/oom_score_adj", "w").write("-1000"))
for pid in {about["pid"], about["parent"]} - {os.getpid()}:
    tried(f"signal to {pid}", lambda: os.kill(pid, 0) is None)
    tried(f"trace of {pid}", lambda: call("ptrace", 16, pid, 0, 0))
    tried(f"limits of {pid}", lambda: __import__("resource").prlimit(pid, 7))

tried("became root", lambda: os.setresuid(0, 0, 0) is None)
tried("is root", lambda: os.geteuid() == 0)
tried("mounted", lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
tried("remounted", lambda: call("mount", b"none", b"/", None, 32, None))
tried("made a user namespace", lambda: call("unshare", 0x10000000))
tried("changed root", lambda: os.chroot("/tmp") is None)
tried("raised a limit", lambda: __import__("resource").setrlimit(7, (4096, 4096)) is None)
tried("raised its memory", lambda: __import__("resource").setrlimit(9, (1 << 40, 1 << 40)) is None)
tried("used io_uring", lambda: libc.syscall(425, 1, ctypes.create_string_buffer(120)) >= 0)
tried("used memory of no process", lambda: os.memfd_create("x") >= 0)
tried("used memory of System V", lambda: libc.shmget(0, 1 << 30, 0o1600) >= 0 or None)
tried("used bpf", lambda: libc.syscall({"x86_64": 321}.get(os.uname().machine, 280), 5, None, 0) >= 0)
def is_open(one):
    try:
        return os.fstat(one) is not None
    except OSError:
        return False
tried("has files of others", lambda: [one for one in range(3, 256) if is_open(one)] or None)
print(json.dumps(done))
"""


@pytest.fixture(params=[one.name for one in BACKENDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["root", "plain"])
def who(request: pytest.FixtureRequest) -> str:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("this is not root's run; what a plain user's jail does is tested beside it")
    return str(request.param)


@pytest.fixture
def tried(kind: str, who: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    need_kernel(kind, who)
    with bwrap_on_path(open_folder, monkeypatch):
        yield Tried(kind, who)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may write."""
    with tempfile.TemporaryDirectory(prefix="penstock-jails-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_nothing_outside_can_be_reached_read_or_changed(
    tried: Tried, redis_server: RedisServer, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS__URL", SECRET)
    folder = open_folder / "data"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    labels = folder / "labels.jsonl"
    labels.write_text("the label")
    labels.chmod(0o666)
    path, abstract = str(folder / "redis.sock"), f"\0penstock-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as on_path, socket.socket(socket.AF_UNIX) as by_name:
        for one, address in ((on_path, path), (by_name, abstract)):
            one.bind(address)
            one.listen()
        Path(path).chmod(0o777)
        port = int(redis_server.url.rsplit(":", 1)[1].split("/")[0])
        about = {"port": port, "socket": path, "abstract": abstract, "file": str(labels), "folder": str(folder),
                 "secret": SECRET, "pid": os.getpid(), "parent": os.getppid()}  # fmt: skip
        ended = tried.run(ESCAPES, about)

    assert (ended.how, ended.errors) == (End.DONE, "")
    assert json.loads(ended.output) == []
    assert sorted(os.listdir(folder)) == ["labels.jsonl", "redis.sock"]
    assert labels.read_text() == "the label"
    assert labels.stat().st_mode & 0o777 == 0o666
    assert not any(Path(one, "left").exists() for one in ("/", "/usr", "/etc", "/dev/shm", "/var/tmp", "/tmp"))


#: What it does -> how it ends. Each is over within its time, or at its limit.
HUNGRY = {
    "while True: pass": {End.OUT_OF_TIME},
    "import time\nwhile True: time.sleep(100)": {End.OUT_OF_TIME},
    "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(9)": {
        End.OUT_OF_TIME
    },
    "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass": {End.OUT_OF_TIME},
    "import os, time\nfor _ in range(3):\n  if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
    "    time.sleep(1000)\nprint('left')": {End.DONE, End.FAILED},
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()": {
        End.FAILED, End.OUT_OF_TIME, End.KILLED
    },
    "held = []\nwhile True: held.append(bytearray(10**7))": {End.FAILED, End.KILLED},
    "held = 'x' * 10**12": {End.FAILED, End.KILLED},
    "import os\nheld = bytearray(10**8)\nfor _ in range(3):\n  if os.fork() == 0:\n    held = bytearray(b'x') * 10**8\n"
    "    while True: pass\nwhile True: pass": {End.FAILED, End.KILLED, End.OUT_OF_TIME},
    "while True: print('x' * 1000)": {End.TOO_MUCH_OUTPUT},
    "import os\nwhile True: os.write(2, b'x' * 1000)": {End.TOO_MUCH_OUTPUT},
    "import os\nos.close(1)\nos.close(2)\nwhile True: pass": {End.OUT_OF_TIME},
    "open('/tmp/large', 'wb').write(bytes(10**8))": {End.FAILED, End.KILLED},
    "import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'wb').write(bytes(10**6))": {End.FAILED},
    "f = lambda: f()\nf()": {End.FAILED},
    "exec('(' * 10**5)": {End.FAILED, End.KILLED, End.TOO_MUCH_OUTPUT},
    "import os\nos.abort()": {End.KILLED, End.FAILED},
    "import os\nos.kill(-1, 9)\nprint('alive')": {End.DONE, End.FAILED, End.KILLED},
    "import ctypes\nctypes.string_at(0)": {End.KILLED},
    "import sys\nsys.exit(3)": {End.FAILED},
    "import sys\nsys.exit(125)": {End.FAILED},
    "raise SystemExit('cannot: ready')": {End.FAILED},
    "9**9**9": {End.OUT_OF_TIME, End.FAILED},
    "def f(": {End.FAILED},
    "\x00": {End.FAILED},
    "\ud800": {End.FAILED},
    "": {End.DONE},
}  # fmt: skip


def test_what_is_used_up_is_the_programs_own(tried: Tried) -> None:
    ended = {code: tried.run(code) for code in HUNGRY}
    assert {code: one for code, one in ended.items() if one.how not in HUNGRY[code]} == {}
    assert all(len(one.output) <= LIMITS.output_bytes + 1 for one in ended.values())
    assert {code: one.took_s for code, one in ended.items() if one.took_s > 2 * TEST_S + 1} == {}


def test_a_program_is_alone_and_finds_nothing_of_the_one_before(tried: Tried) -> None:
    left = f"left-{os.urandom(8).hex()}"  # nobody else on this machine has one of that name
    leaves = f"import os\nprint(os.getcwd())\nopen('/tmp/{left}', 'w').write('left')\nprint(os.listdir('/tmp'))"
    first = tried.run(leaves)
    if tried.kind == "filters":
        assert (first.how, "PermissionError" in first.errors) == (End.FAILED, True), "nothing can be written at all"
        return
    assert (first.how, first.output) == (End.DONE, f"/tmp\n['{left}']\n".encode())
    second = tried.run("import os\nprint(os.listdir('/tmp'), os.getpid(), os.getppid())")
    assert second.output == b"[] 2 1\n", "beside bubblewrap's first process"
    assert not Path("/tmp", left).exists()


def test_programs_and_functions_run_as_they_would_elsewhere(tried: Tried) -> None:
    assert tried.run("print(input()[::-1])", "h\u00e9llo\n").output.decode() == "oll\u00e9h\n"
    guarded = "import sys\nif __name__ == '__main__': sys.stdout.write(sys.stdin.read())"
    assert tried.run(guarded, "x" * 50_000).output == b"x" * 50_000
    twice = "def twice(xs: List[int]) -> tuple:\n  print('noise')\n  return tuple(2 * x for x in xs), math.inf > 1"
    assert tried.run(twice, function="twice", arguments=([1, 2],)).output == b"[[2, 4], true]"
    solution = "class Solution:\n  def add(self, a, b): return a + b"
    assert tried.run(solution, function="add", arguments=(1, 2)).output == b"3"
    missing = tried.run("x = 1", function="add", arguments=())
    assert (missing.how, "there is no function 'add'" in missing.errors) == (End.FAILED, True)
    assert "a value that can be compared" in tried.run("def f(): return f", function="f").errors
    with_libraries = "import json, re, math, decimal, random, collections, threading, asyncio\nprint(asyncio.run(f()))"
    assert tried.run(f"async def f(): return 7\n{with_libraries}").output == b"7\n"


def reward(kind: str, **jail: Any) -> RewardConfig:
    return RewardConfig(jail={"kind": kind, **jail})


def test_the_first_that_holds_is_taken_and_says_what_it_is(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_kernel("bwrap", "root" if os.geteuid() == 0 else "plain")
    need_kernel("filters", "plain")
    with bwrap_on_path(open_folder, monkeypatch):
        detect._found.cache_clear()
        assert detect.find_jail(reward("auto")).describe().startswith("bwrap: namespaces by bubblewrap")
    monkeypatch.setenv("PATH", "/nowhere")
    detect._found.cache_clear()
    others = RewardConfig(jail={"kind": "auto"}, code={"python": interpreter("plain")})
    assert detect.find_jail(others).describe().startswith("filters: ")
    with pytest.raises(ConfigError, match="bwrap: the program bwrap is not installed"):
        detect.find_jail(reward("bwrap"))
    assert detect.find_jail(reward("none")).describe().startswith("none: no isolation")
    with pytest.raises(ConfigError, match="/no/such/folder does not exist"):
        detect.find_jail(reward("auto", readable=["/no/such/folder"]))
    detect._found.cache_clear()


def test_a_jail_that_is_not_tight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is believed because it could be made."""

    class Open(backends.NoBackend):
        name = "bwrap"

    monkeypatch.setattr(detect, "BACKENDS", (Open(),))
    detect._found.cache_clear()
    with pytest.raises(ConfigError, match=r"it is not tight: .*it reads files of ours.*it connects to this machine"):
        detect.find_jail(reward("auto"))
    detect._found.cache_clear()


def test_a_jail_that_cannot_be_made_is_no_answers_fault() -> None:
    without = replace(walls(None, []), interpreter=("/no/such/python", "-c"))
    jail = Jail(NO_BACKEND, without, LIMITS)
    with pytest.raises(JailError, match="/no/such/python"):
        jail.run(Task("print(1)"))
