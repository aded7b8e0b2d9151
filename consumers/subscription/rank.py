"""Identify a process among the trainer processes of a subscription by role, share and replica (T13, T14).

    subscription ─┬─ role actor (drives: requests, publishes, rewinds) ── dp_rank 0..3 x replica 0..1 = rank 0..7
    └─ role critic (follows)                             ── dp_rank 0..1               = rank 0..1

All roles train the same manifests; a batch is committed once every rank of every role has committed it. Replicas
(tensor-, pipeline- and context-parallel) are ranks with the same share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.names import check_name


@dataclass(frozen=True, slots=True)
class Seat:
    """Identify one process of a trainer."""

    dp_rank: int = 0
    dp_size: int = 1
    replica: int = 0
    num_replicas: int = 1
    #: Role of this process; '' if the subscription has one role.
    role: str = ""
    #: All roles, the driving role first; () for one role.
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.dp_rank < self.dp_size and 0 <= self.replica < self.num_replicas):
            raise ConfigError(
                f"invalid dp_rank {self.dp_rank} of {self.dp_size} or replica {self.replica} of {self.num_replicas}: "
                "count from 0."
            )
        for role in self.roles:
            check_name("role", role)
        if len(set(self.roles)) != len(self.roles):
            raise ConfigError(f"roles {', '.join(self.roles)} have duplicates: list each role once.")
        if self.role not in (self.roles or ("",)):
            raise ConfigError(
                f"role {self.role!r} is not in roles ({', '.join(self.roles) or 'none'}): pass the same roles to every "
                "trainer of the subscription, the driving role first."
            )

    @property
    def rank(self) -> int:
        """Return the index among the processes of the role."""
        return self.dp_rank * self.num_replicas + self.replica

    @property
    def ranks(self) -> int:
        """Return the number of processes of the role."""
        return self.dp_size * self.num_replicas

    @property
    def drives(self) -> bool:
        """Return whether this role requests batches, publishes and rewinds."""
        return not self.roles or self.role == self.roles[0]

    @property
    def leads(self) -> bool:
        """Return whether this process owns the subscription."""
        return self.drives and self.rank == 0

    def who(self, name: str) -> str:
        """Return the name of this process in waits."""
        parts = [name, *([] if self.drives else [self.role]), *([str(self.rank)] if self.rank else [])]
        return "trainer:" + "/".join(parts)

    def name_of(self, rank: int, role: str | None = None) -> str:
        """Describe rank ``rank`` for messages."""
        of = self.role if role is None else role
        words = f"rank {rank}"
        if of == self.role and self.num_replicas > 1:
            words += f" (dp_rank {rank // self.num_replicas}, replica {rank % self.num_replicas})"
        return f"{words} of role {of}" if of else words


def missing(seat: Seat, bits: str) -> tuple[str, ...]:
    """Return descriptions of ranks that have not committed, from ``BatchCommit.bits``; () if all have."""
    words = []
    for entry in bits.split(","):
        role, _, done = entry.partition(":")
        if not done:
            words.append(f"every rank of role {role}" if role else "every rank")
        words += [seat.name_of(rank, role) for rank, bit in enumerate(done) if bit == "0"]
    return tuple(words)


def job_of(environment: Mapping[str, str]) -> str:
    """Return an identifier shared by the ranks of one launch, from torchrun's or Slurm's environment, or ''.

    torchrun counts restarts of ranks; Slurm numbers jobs, requeues and steps.
    """
    names: tuple[str, ...] = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" not in environment:
        names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        if "SLURM_JOB_ID" not in environment:
            return ""
    return "/".join(environment.get(name, "") for name in names)
