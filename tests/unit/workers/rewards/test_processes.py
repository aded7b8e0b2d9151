"""The limits of a process that checks answers are those of one check (T11)."""

import signal
import subprocess
import sys

#: A check whose label takes for ever, behind one that left little of its own time.
SECOND = """
import resource
from penstock.workers.rewards.kinds.kind import Question
from penstock.workers.rewards.kinds.registry import kind_of
from penstock.config import RewardConfig
from penstock.workers.rewards.processes import check, import_package

kind = kind_of("math_verify")
import_package(kind)
usage = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1, resource.RLIM_INFINITY))
check(kind, Question(label="9^{9^{9^{9}}}", text="3"), 3, RewardConfig())
"""


def test_T11_what_is_left_of_the_check_before_is_no_limit_of_a_label() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGPROF, "not SIGXCPU, by which the answer would be worth 0"
