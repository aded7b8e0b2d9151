"""What a part loads; that no import crosses a wall is checked by `make check`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["workers.fleet.main", "penstock.redis.connect", "buffer.main", "producer.main"])
def test_a_part_loads_nothing_of_the_console(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.split('.')[0] == 'console'])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"
