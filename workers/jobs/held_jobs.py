"""All jobs that one worker holds: added at their lease, removed at their end, stopped when another worker has them."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial

from penstock.names import Lane
from penstock.protocol.scripts import RawLease
from penstock.workers.jobs.heartbeat import Lease
from penstock.workers.jobs.held_job import HeldJob
from penstock.workers.services import Services


class HeldJobs(Mapping[str, HeldJob]):
    """Job id -> the job, from its lease to its end. Create it in the worker's event loop, which alone changes it."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._jobs: dict[str, HeldJob] = {}
        #: Raises the unexpected error that ended a job's task; never done otherwise.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Leases that another worker had at the last renewal, while a call in flight may have ended them.
        self._doubtful: set[Lease] = set()

    def __getitem__(self, job: str) -> HeldJob:
        return self._jobs[job]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_undrawn(self) -> int:
        """Samples that wait for a slot or are being generated."""
        return sum(held.num_undrawn for held in self.values())

    @property
    def num_open(self) -> int:
        """Samples that are not committed."""
        return sum(held.num_open for held in self.values())

    @property
    def num_suspects(self) -> int:
        """Jobs of the lane ``suspect``."""
        return sum(held.lease.lane == Lane.SUSPECT for held in self.values())

    def take(self, lease: RawLease) -> None:
        """Start to work on a leased job."""
        held = HeldJob(self._services, lease)
        before = self._jobs.get(held.job)
        if before is not None:
            # Leased again, so the earlier lease is over.
            before.lose()
        self._jobs[held.job] = held
        held.start().add_done_callback(partial(self._forget, held))

    def _forget(self, held: HeldJob, task: "asyncio.Task[None]") -> None:
        if self._jobs.get(held.job) is held:
            del self._jobs[held.job]
        self._services.room.set()
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not self.failed.done():
            self.failed.set_exception(failure)

    def leases(self) -> list[Lease]:
        """Return the leases held, as far as is known. Safe in another thread."""
        return [(job, held.lease.token) for job, held in list(self._jobs.items()) if not held.lost]

    def lose(self, gone: set[Lease]) -> None:
        """Stop jobs that another worker has leased.

        Args:
            gone: all leases that another worker had at this renewal.
        """
        for job, token in gone:
            held = self._jobs.get(job)
            # A commit in flight may have ended the lease itself: its reply says so, or the next renewal.
            if held and held.lease.token == token and (not held.is_ending or (job, token) in self._doubtful):
                held.lose()
        self._doubtful = gone

    def release(self, death: str = "") -> None:
        """Hand every job back; returns at once. ``death`` is the error that ends the worker, '' if it drains."""
        for held in list(self.values()):
            held.release(death)

    async def ended(self) -> None:
        """Wait until no job is held."""
        while tasks := [held.task for held in self.values() if held.task is not None]:
            await asyncio.wait(tasks)
