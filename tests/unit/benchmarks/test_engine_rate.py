"""CPU time is counted of the processes of the benchmark alone."""

import os
import signal
import subprocess
import sys

from benchmarks.engine_rate import processor_s

NAMED = [sys.executable, "-c", "print(flush=True); input()", "penstock.cli worker"]


def test_only_processes_that_the_benchmark_started_are_counted() -> None:
    """Another run on the machine has processes of the same names, which begin and end as they like."""
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)", "penstock.cli worker"]
    foreign = int(subprocess.check_output([sys.executable, "-c", start, *sleeper]))
    with subprocess.Popen(NAMED, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as own:
        try:
            assert own.stdout is not None
            own.stdout.readline()
            found = processor_s()
        finally:
            os.kill(foreign, signal.SIGKILL)
            own.kill()
    assert foreign not in found
    assert found[own.pid][0] == "worker"
