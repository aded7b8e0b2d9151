"""One complete group, as the buffer remembers it: a few numbers; its metadata stays in Redis until it is cut."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Group:
    """A group that is ready and not yet retired."""

    job: str
    lane: str
    #: Place in the order of admission to its lane, from 1.
    seq: int
    #: Place in the order of completion.
    completed: int
    #: Samples that are there.
    n: int
    #: Oldest version of any generated token; -1 where nothing was generated.
    oldest: int
    #: All versions that generated tokens were drawn with, ascending.
    versions: tuple[int, ...] = ()
    #: Samples that were asked for; more than ``n`` where the group was closed without the rest.
    wanted: int = 0
    #: Samples whose payload is permanent, or lost for good; n: may be cut.
    kept: int = 0
    #: k of samples whose payload is gone.
    lost: frozenset[int] = frozenset()
    #: Subscription -> uses so far, or the negative code of a disposal.
    uses: dict[str, int] = field(default_factory=dict)
    #: Subscription -> last batch that holds it.
    batches: dict[str, int] = field(default_factory=dict)
