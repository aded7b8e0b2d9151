"""The filter of system calls, against the kernel's own list, where its headers are installed."""

import re
import struct
from pathlib import Path

import pytest

from penstock.workers.rewards.jail import filters

HEADERS = {
    "x86_64": ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"],
    "aarch64": ["/usr/include/asm-generic/unistd.h"],
}
_DEFINED = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)")


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_calls_are_the_kernels(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    header = next((Path(path) for path in HEADERS[machine] if Path(path).exists()), None)
    if header is None:
        pytest.skip(f"the kernel's headers for {machine} are not installed")
    known = {name: int(number) for name, number in _DEFINED.findall(header.read_text())}
    monkeypatch.setattr(filters, "machine", lambda: machine)

    ours = filters.calls(strict=True)

    # Headers may be older than a call.
    assert {name: number for name, number in ours.items() if name in known and known[name] != number} == {}
    assert len(ours.keys() & known.keys()) > 0.9 * len(ours)
    assert not {"read", "write", "execve", "mmap", "futex", "exit_group"} & ours.keys()


@pytest.mark.parametrize("machine", HEADERS)
@pytest.mark.parametrize("strict_for", [None, 7])
def test_each_jump_of_the_filter_stays_in_it(
    machine: str, strict_for: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "machine", lambda: machine)
    program = filters.program(strict_for=strict_for)
    lines = list(struct.iter_unpack("HBBI", program))
    assert len(lines) < 4096, "what the kernel takes"
    for at, (_, if_true, if_false, _) in enumerate(lines):
        assert at + max(if_true, if_false) + 1 <= len(lines)
    assert lines[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_a_machine_whose_calls_are_not_known_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "machine", lambda: "riscv64")
    assert not filters.is_known()
