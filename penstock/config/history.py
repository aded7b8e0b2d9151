"""Section ``history``: what is kept of samples when their groups are deleted from Redis."""

from typing import Annotated

from pydantic import Field

from penstock.config.section import Positive, Seconds, Section


class HistoryConfig(Section):
    """The rows of the history, in the folder ``history`` of the run; the recorder (`penstock recorder`) writes them."""

    #: Whether `penstock run` starts a recorder.
    enabled: bool = True
    #: Answers and tokens are kept of every so manieth group, in the order of admission; 1: of all. The samples of the
    #: others have a row without them.
    keep_every: Positive = 1
    #: Answers and tokens are kept of at most so many groups of each version; None: of all.
    keep_per_version: Annotated[int, Field(ge=0)] | None = None
    #: Most groups that stay in Redis to be recorded; more are deleted without rows, and counted. At least those
    #: between two checkpoints, which retire together.
    backlog: Positive = 4096
    #: Groups wait so long for a recorder that is not running; then they are deleted without rows, and counted.
    patience_s: Seconds = 60.0
    #: Most bytes of the files; the oldest go first.
    max_bytes: Annotated[int, Field(ge=16 * 2**20)] = 16 * 2**30
