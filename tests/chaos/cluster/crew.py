"""The parts of a run by kind, and the signals that they are sent."""

import signal

from tests.chaos.cluster.supervisor import Part, Supervisor


class Crew:
    """Parts that a supervisor keeps up, which is there from the start on."""

    _supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        """What keeps the parts up."""
        assert self._supervisor is not None, "nothing was started"
        return self._supervisor

    @property
    def parts(self) -> dict[str, Part]:
        """All parts, by name, as they are now."""
        return self.supervisor.parts

    def of(self, kind: str) -> list[Part]:
        """Parts of a kind that are not retired."""
        return [part for part in list(self.parts.values()) if part.kind == kind and not part.is_retired]

    def kill(self, part: Part, sig: int = signal.SIGKILL) -> int:
        """Signal the process that has the part now; its pid, or 0 where it was dead."""
        return self.supervisor.send(part, sig)

    def stop(self, part: Part) -> int:
        """SIGSTOP, as :meth:`kill`."""
        return self.supervisor.send(part, signal.SIGSTOP)

    def cont(self, part: Part) -> int:
        """SIGCONT, as :meth:`kill`."""
        return self.supervisor.send(part, signal.SIGCONT)

    def hold_down(self, part: Part) -> None:
        """Have it left dead, once it is."""
        self.supervisor.hold(part)

    def let_up(self, part: Part) -> None:
        """Have it kept up again."""
        self.supervisor.let_up(part)
