"""Errors that penstock raises on purpose."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.records.cause import Cause

#: Exit codes of commands and parts.
EXIT_ERROR = 1
#: Its configuration is invalid: supervisors treat a second such exit in a row as final.
EXIT_CONFIG = 2
EXIT_INTERRUPT = 130
#: The reader of the output is gone (``| head``): 128 and the number of SIGPIPE, as in other programs.
EXIT_PIPE = 141


class PenstockError(Exception):
    """Base of all errors that penstock raises on purpose. The text is one sentence that says what to do."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the arguments of the constructor, so that Ray and process pools can pass it on."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[PenstockError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(PenstockError):
    """The configuration cannot work. The text names the key and what to change."""


class QueueUnavailable(PenstockError):
    """Redis cannot be reached, or does not answer as it should."""


class QueueRefused(QueueUnavailable):
    """Redis answers, and refuses the password or this user's rights, or is too old: waiting changes nothing."""


class QueueLost(QueueUnavailable):
    """Redis answers, and lost keys of the run, as after FLUSHALL, a deletion or an eviction. The text names them."""


class QueueFull(PenstockError):
    """Redis holds more than 85 % of its maxmemory; admit and commit stop until there is room.

    Args:
        cause: what a caller that waits for room reports.
    """

    def __init__(self, message: str, cause: "Cause") -> None:
        super().__init__(message)
        self.cause = cause


class DiskFull(PenstockError):
    """A file system has no room for what is to be written. The text names the place."""


class Fenced(PenstockError):
    """A right was lost meanwhile; nothing was changed."""


class LeaseLost(Fenced):
    """The group's lease token is not the caller's: another worker may hold the job now."""


class LeadershipLost(Fenced):
    """The (epoch, token) of the caller is not that of the leader."""


class RecordingLost(Fenced):
    """The (epoch, token) of the caller is not that of the recorder."""


class OwnershipLost(Fenced):
    """The (owner, gen) of the caller is not that of the subscription."""


class ProtocolError(PenstockError):
    """A step was asked for in a state that does not allow it."""


class RolesApart(ProtocolError):
    """A role has trained batches behind the one from which the driving role goes on: restore an earlier checkpoint.

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
    """The episode started over, so that a key of it has no more use."""

    def __init__(self) -> None:
        super().__init__("The episode started over, and this key is of its earlier attempt: open another episode.")


class EpisodeFailed(PenstockError):
    """The agent reported that its episode failed."""


class PayloadError(PenstockError):
    """The bytes of a sample's payload are not what they claim to be."""


class EngineError(PenstockError):
    """The engine refused a request or answered what it may not."""


class EngineRefused(EngineError):
    """The engine says that this request can never be answered; another try would be refused too."""


class EngineDied(EngineError):
    """The engine process is gone, or stopped answering for longer than its health limit."""


class MemberDied(EngineDied):
    """One of several engines behind a router was lost under a request; the others go on."""


class ScoreError(PenstockError):
    """A scoring job was buried or cancelled, or its results are gone."""


class EnvironmentTimeout(PenstockError):
    """A sample's environment did not answer within ``rollout.environment_timeout_s``."""


class EnvironmentRaised(PenstockError):
    """A sample's environment raised, tried to exit, or answered what is no Observation."""


class UserCodeError(PenstockError):
    """Code of the user's gave no result, or one that it may not give.

    Args:
        outcome: the ``JobFailure`` that it is to its job: ``reward_raised``, ``hook_timeout``, ...
        message: what happened, with the sample's id or the name of the function.
    """

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class RewardError(UserCodeError):
    """A reward could not be computed."""


class JudgeError(RewardError):
    """A model that judges gave no answer, or one that is none, within its tries. The text names it."""

    #: Its name if it is unreachable: it answers no request.
    away = ""


class FrozenModelError(PenstockError):
    """A frozen model that scores samples gave no log-probabilities of one within its tries. The text names both."""


class HookError(UserCodeError):
    """A function that section ``hooks`` names raised, hung, or gave what it may not."""


class HistoryError(PenstockError):
    """A file of a run's history is damaged, of another release, or none at all. The text names it."""


class PublishError(PenstockError):
    """Weights cannot be announced, or a worker cannot load them.

    Args:
        cause: what a worker that refuses the version reports as its wait; None: the text says all.
    """

    def __init__(self, message: str, cause: "Cause | None" = None) -> None:
        super().__init__(message)
        self.cause = cause


class WeightsNotFinite(PublishError):
    """Weights hold NaN or Inf, so their publication was refused; the text names a tensor."""


class DataEnded(PenstockError):
    """No batch comes any more: every prompt of ``data.epochs`` passes was admitted, and what is left makes no batch."""


class WaitTimeout(PenstockError):
    """A wait ran out of its time; the text says what it waited for, and holds the count and the cause.

    Args:
        count: how many of what it waited for had come (groups of a batch, rows of a column, ranks, workers, prompts);
            None where nobody counts them.
        cause: what was missing when the time ran out; its text is ``str(cause)``, None where it is not known.
    """

    def __init__(self, message: str, *, count: int | None = None, cause: "Cause | None" = None) -> None:
        super().__init__(message)
        self.count = count
        self.cause = cause
