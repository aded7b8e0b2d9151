"""Penstock: a message-queue driven, asynchronous rollout producer for reinforcement learning of language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consumers.batch import Batch as Batch
    from consumers.scorer import Score as Score
    from consumers.scorer import Scorer as Scorer
    from consumers.scorer import score as score
    from consumers.trainer import Trainer as Trainer
    from penstock.groups import CompletedGroup as CompletedGroup
    from penstock.messages import Job as Job
    from penstock.messages import Sample as Sample

__version__ = "0.1.0"

#: Public name -> module that has it; loaded when first asked for (PEP 562), so that importing penstock stays light.
_LAZY = {
    "Trainer": "consumers.trainer",
    "Batch": "consumers.batch",
    "Score": "consumers.scorer",
    "Scorer": "consumers.scorer",
    "score": "consumers.scorer",
    "Sample": "penstock.messages",
    "Job": "penstock.messages",
    "CompletedGroup": "penstock.groups",
}

__all__ = ["Batch", "CompletedGroup", "Job", "Sample", "Score", "Scorer", "Trainer", "__version__", "score"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
