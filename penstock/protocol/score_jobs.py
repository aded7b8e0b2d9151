"""Content of a scoring job: sequences whose log-probabilities are requested. Written by clients, read by workers.

One job has up to ``MAX_SEQUENCES`` of them; sample k of the job is sequence k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError, ProtocolError
from penstock.names import Lane
from penstock.records.job import Job
from penstock.text import safe_repr

#: Most sequences of one job, and most tokens of a job that has more than one.
MAX_SEQUENCES = 32
MAX_TOKENS = 256 * 1024


@dataclass(frozen=True, slots=True)
class Given:
    """One sequence to be scored."""

    #: [L] prompt and response.
    tokens: list[int]
    #: Index of the first token that is scored, 1 <= start < L.
    start: int


def check_temperature(what: str, temperature: object) -> None:
    """Raise ConfigError for a temperature at which existing tokens cannot be scored: any but 1.

    SGLang divides the logits by the temperature only when it samples: its logprobs of given tokens are those before
    temperature, and no parameter of its /generate changes that.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature != 1:
        raise ConfigError(
            f"{what} asks for log-probabilities at temperature {safe_repr(temperature)}, but engines give those of "
            "existing tokens only at temperature 1: score at 1, or compute log_softmax(logits / temperature) in the "
            "trainer."
        )


def make_job(job: str, given: Sequence[Given]) -> Job:
    """Make the job that scores these sequences; its id is ``DATASET/EPOCH/INDEX``."""
    sequences = [[one.start, one.tokens] for one in given]
    return Job(id=job, n=len(given), lane=Lane.SCORE, sampling={"temperature": 1.0}, metadata={"sequences": sequences})


def read_given(job: Job, k: int) -> Given:
    """Return sequence ``k`` of a scoring job.

    Raises:
        ProtocolError: it is missing, or cannot be scored.
    """
    try:
        start, tokens = job.metadata["sequences"][k]
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise ProtocolError(f"scoring job {job.id} has no sequence {k}: it was not written by penstock.") from exc
    whole = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not whole or type(start) is not int or not 0 < start < len(tokens):
        raise ProtocolError(f"sequence {k} of scoring job {job.id} is not a start within a list of token ids.")
    return Given(tokens, start)
