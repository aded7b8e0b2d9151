"""Define the errors that penstock raises deliberately."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.records.cause import Cause

#: Exit codes of commands and processes.
EXIT_ERROR = 1
#: Invalid configuration; supervisors do not restart after a second such exit in a row.
EXIT_CONFIG = 2
EXIT_INTERRUPT = 130
#: The reader of the output exited (``| head``): 128 plus the number of SIGPIPE, as for other programs.
EXIT_PIPE = 141


class PenstockError(Exception):
    """Base of all errors that penstock raises deliberately. The text is one sentence with the error and its fix."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling the constructor, so that Ray and process pools can pass the error on."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[PenstockError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(PenstockError):
    """The configuration cannot work. The text names the key and what to change."""


class QueueUnavailable(PenstockError):
    """Redis is unreachable, or answers incorrectly."""


class QueueRefused(QueueUnavailable):
    """Redis rejects the password or the user's rights, or is too old: retrying does not help."""


class QueueLost(QueueUnavailable):
    """Redis lost keys of the run, for example by FLUSHALL, a deletion or an eviction. The text names them."""


class QueueFull(PenstockError):
    """Redis holds more than 85 % of its maxmemory; admit and commit stop until there is room.

    Args:
        cause: wait that the caller reports.
    """

    def __init__(self, message: str, cause: "Cause") -> None:
        super().__init__(message)
        self.cause = cause


class DiskFull(PenstockError):
    """A file system is full. The text names the path."""


class Fenced(PenstockError):
    """The caller lost its lease, leadership or ownership; nothing was changed."""


class LeaseLost(Fenced):
    """The lease token is not the group's current one: another worker may hold the job."""


class LeadershipLost(Fenced):
    """The (epoch, token) of the caller is not that of the leader."""


class RecordingLost(Fenced):
    """The (epoch, token) of the caller is not that of the recorder."""


class OwnershipLost(Fenced):
    """The (owner, gen) of the caller is not that of the subscription."""


class ProtocolError(PenstockError):
    """A record is invalid, or a step is not allowed in the current state."""


class RolesApart(ProtocolError):
    """A role is ahead of the batch from which the driving role resumes: restore an earlier checkpoint of it.

    Args:
        batch: the last batch that a checkpoint may hold.
    """

    def __init__(self, batch: int, message: str) -> None:
        super().__init__(message)
        self.batch = batch


class EpisodeKeyInvalid(PenstockError):
    """An API key is malformed, or was not signed with this run's token. The text does not repeat it: it is secret."""

    def __init__(self) -> None:
        super().__init__("This is not the key of an episode of this run: use the key that POST /v1/episodes returned.")


class EpisodeMoved(PenstockError):
    """This worker does not hold the episode; another one may."""

    def __init__(self) -> None:
        super().__init__("This worker does not hold the episode: send the request to the worker that does.")


class EpisodeSuperseded(PenstockError):
    """The episode started over, so its earlier key is invalid."""

    def __init__(self) -> None:
        super().__init__("The episode started over, and this key is of its earlier attempt: open another episode.")


class EpisodeFailed(PenstockError):
    """The agent reported that its episode failed."""


class PayloadError(PenstockError):
    """The bytes of a sample's payload are corrupt."""


class EngineError(PenstockError):
    """The engine rejected a request or returned an invalid answer."""


class EngineRefused(EngineError):
    """The engine rejected a request permanently; a retry would fail as well."""


class EngineDied(EngineError):
    """The engine process died, or did not answer within its health limit."""


class MemberDied(EngineDied):
    """One of several engines behind a router died during a request; the others continue."""


class ScoreError(PenstockError):
    """A scoring job became a dead letter or was cancelled, or its results were deleted."""


class EnvironmentTimeout(PenstockError):
    """A sample's environment did not answer within ``rollout.environment_timeout_s``."""


class EnvironmentRaised(PenstockError):
    """A sample's environment raised, tried to exit, or did not return an Observation."""


class UserCodeError(PenstockError):
    """User code returned no result, or an invalid one.

    Args:
        outcome: the ``JobFailure`` to record for the job: ``reward_raised``, ``hook_timeout``, ...
        message: what happened, with the sample's id or the name of the function.
    """

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class RewardError(UserCodeError):
    """A reward could not be computed."""


class JudgeError(RewardError):
    """A judge returned no valid answer within its attempts. The text names it."""

    #: Name of the judge if it is unreachable, else ''.
    away = ""


class FrozenModelError(PenstockError):
    """A frozen model returned no log-probabilities of a sample within its attempts. The text names both."""


class HookError(UserCodeError):
    """A function of section ``hooks`` raised, timed out, or returned an invalid value."""


class HistoryError(PenstockError):
    """A file is not a readable part of a history: damaged, of another release, or foreign. The text names it."""


class PublishError(PenstockError):
    """Weights cannot be announced, or a worker cannot load them.

    Args:
        cause: wait that a worker which rejects the version reports; None if the text suffices.
    """

    def __init__(self, message: str, cause: "Cause | None" = None) -> None:
        super().__init__(message)
        self.cause = cause


class WeightsNotFinite(PublishError):
    """Weights contain NaN or Inf, so their publication was rejected; the text names a tensor."""


class DataEnded(PenstockError):
    """No further batch will be cut: all prompts of ``data.epochs`` are admitted, and too few groups remain."""


class WaitTimeout(PenstockError):
    """A wait timed out; the text describes what was awaited, with the count and the cause.

    Args:
        count: number of awaited items (groups of a batch, rows of a column, ranks, workers, prompts) that had arrived;
            None if they are not counted.
        cause: what was missing at the time-out; None if unknown.
    """

    def __init__(self, message: str, *, count: int | None = None, cause: "Cause | None" = None) -> None:
        super().__init__(message)
        self.count = count
        self.cause = cause
