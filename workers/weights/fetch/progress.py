"""How a fetch goes, for whoever waits for it."""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Of one fetch: written by the thread that fetches, read by any."""

    #: What it waits for, in words; '' for nothing that has a name.
    waits_for: str = ""
    #: Bytes that came.
    num_bytes: int = 0

    def wait_for(self, what: str) -> None:
        self.waits_for = what

    def of(self, what: str) -> str:
        """What is waited for, with what that waits for."""
        return f"{what}: {self.waits_for}" if self.waits_for else what
