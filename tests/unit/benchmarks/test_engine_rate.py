"""CPU time is counted of the processes of the benchmark alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.engine_rate import processor_s


def test_only_processes_of_the_benchmark_and_its_engine_are_counted(tmp_path: Path) -> None:
    """Another run on the machine has processes of the same names, which begin and end as they like."""
    # The shell that starts them ends, so that the engine is no descendant of the benchmark.
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)", "sglang.launch_server"]
    foreign, engine = (
        int(subprocess.check_output([sys.executable, "-c", start, *sleeper, "--model-path", str(folder)]))
        for folder in ("/elsewhere/model", tmp_path / "model")
    )
    named = [sys.executable, "-c", "print(flush=True); input()", "penstock.cli worker"]
    with subprocess.Popen(named, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as own:
        try:
            assert own.stdout is not None
            own.stdout.readline()
            found = processor_s(tmp_path)
        finally:
            for pid in (foreign, engine, own.pid):
                os.kill(pid, signal.SIGKILL)
    assert foreign not in found
    assert (found[own.pid][0], found[engine][0]) == ("worker", "tokenizer")
