"""Determine which weights generated the tokens of one answer, as far as the server reports it (T6)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineDied
from penstock.text import safe_repr
from penstock.workers.sglang.segment import count_of, spans_of
from penstock.workers.sglang.stream import number_in


@dataclass(frozen=True, slots=True)
class Provenance:
    """Facts about one request when its answer arrives."""

    #: Request id, for errors.
    rid: str
    #: Version that was loaded when the request was sent; -1: the initial weights of the server.
    sent: int
    #: Newest version that was loaded, or whose load has begun.
    newest: int
    #: Whether the server reports spans of versions.
    has_spans: bool
    #: Whether weights may change while a request is answered.
    in_place: bool
    #: Tokens after a weight change that may still be of the old weights.
    window: int
    #: Ranges (first, last) of versions with the same weights.
    same: Sequence[tuple[int, int]] = ()

    def versions(self, meta: dict[str, Any], count: int) -> tuple[list[int], list[bool]]:
        """Return [T] the version of each token, and [T] whether a newer one may have generated it.

        The versions are those of the reported spans; without spans, the version when the request was sent.

        Weights only move forward, so that version is the oldest that could have generated a token, and the true one
        whenever the request was answered before the next load (drain, abort).

        Args:
            meta: ``meta_info`` of the answer.
            count: T.

        Raises:
            EngineDied: weights of another run or worker generated it.
            EngineError: the spans do not cover its tokens.
        """
        last = self.check(meta.get("weight_version"))
        spans = spans_of(meta, count, self.rid) if self.has_spans else []
        if spans:
            return self._by_spans(spans)
        # No token has newer weights than the version at the end of the answer.
        newest = (last if last >= 0 else self.newest) if self.in_place else self.sent
        return [self.sent] * count, [self.sent < newest] * count

    def _by_spans(self, spans: Sequence[tuple[Any, int]]) -> tuple[list[int], list[bool]]:
        versions: list[int] = []
        doubted: list[bool] = []
        older = self.sent
        for reported, length in spans:
            version = self.check(reported)
            unproven = min(self.window, length) if version != older else 0
            versions += [older] * unproven + [version] * (length - unproven)
            doubted += [True] * unproven + [False] * (length - unproven)
            older = version
        return versions, doubted

    def has_stale_prefix(self, meta: dict[str, Any]) -> bool:
        """Return whether the request started under newer weights than when it was sent, on prefix KV of older ones.

        A request that waits in the server's queue during an in-place update uses the prefix namespace of the version
        it was sent under. Its tokens follow the policy of no version, so they are generated again.
        """
        spans = meta.get("weight_versions") if self.has_spans else None
        if not spans or not count_of(meta, "cached_tokens", self.rid):
            return False
        first = spans[0]["version"]
        version = number_in(first) if isinstance(first, str) else None
        if version is None or version <= self.sent:
            return False
        return not any(earliest <= self.sent and version <= last for earliest, last in self.same)

    def check(self, reported: Any) -> int:
        """Return the version a server reports, -1 if none. Raises EngineDied if it cannot be one of ours."""
        known = number_in(reported) if isinstance(reported, str) else None
        version = -1 if known is None else known
        if self.sent >= 0 and reported is not None and not self.sent <= version <= self.newest:
            raise EngineDied(
                f"{self.rid}: the engine answered with weights {safe_repr(reported)}, but {self.sent} to {self.newest} "
                "was loaded: it was restarted or loaded by someone else; load the current publication."
            )
        return version
