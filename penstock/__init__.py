"""Penstock: a message-queue driven, asynchronous rollout producer for reinforcement learning of language models.

Everything public can be imported from here, and is loaded on first use (PEP 562), so that importing penstock
is fast.
"""

from typing import TYPE_CHECKING, Any

from penstock.names import __version__ as __version__

if TYPE_CHECKING:
    from penstock.config import Config as Config
    from penstock.consumers.adapters.engine_metrics import EngineMetrics as EngineMetrics
    from penstock.consumers.adapters.iterable import RolloutDataset as RolloutDataset
    from penstock.consumers.adapters.prompts import Request as Request
    from penstock.consumers.adapters.requests import Requests as Requests
    from penstock.consumers.adapters.rollout_manager import RolloutManager as RolloutManager
    from penstock.consumers.adapters.trl import TrlRollouts as TrlRollouts
    from penstock.consumers.adapters.verl import VerlRollout as VerlRollout
    from penstock.consumers.batch.batch import Batch as Batch
    from penstock.consumers.grpo.trackers.trackers import Trackers as Trackers
    from penstock.consumers.scorer import Score as Score
    from penstock.consumers.scorer import Scorer as Scorer
    from penstock.consumers.scorer import score as score
    from penstock.consumers.trainer import Trainer as Trainer
    from penstock.consumers.weights.sender import Sender as Sender
    from penstock.consumers.weights.sources import Shards as Shards
    from penstock.consumers.weights.sources import concatenated as concatenated
    from penstock.errors import ConfigError as ConfigError
    from penstock.errors import DataEnded as DataEnded
    from penstock.errors import JudgeError as JudgeError
    from penstock.errors import OwnershipLost as OwnershipLost
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import RolesApart as RolesApart
    from penstock.errors import WaitTimeout as WaitTimeout
    from penstock.history.row import SampleRow as SampleRow
    from penstock.hooks.signatures import AllSamplesHook as AllSamplesHook
    from penstock.hooks.signatures import ConvertHook as ConvertHook
    from penstock.hooks.signatures import EvalLogHook as EvalLogHook
    from penstock.hooks.signatures import GenerateHook as GenerateHook
    from penstock.hooks.signatures import PostprocessHook as PostprocessHook
    from penstock.hooks.signatures import RewardsHook as RewardsHook
    from penstock.hooks.signatures import RolloutHook as RolloutHook
    from penstock.hooks.signatures import RolloutLogHook as RolloutLogHook
    from penstock.hooks.signatures import SampleHook as SampleHook
    from penstock.hooks.signatures import SamplesHook as SamplesHook
    from penstock.producer.sources.rows import RowSource as RowSource
    from penstock.records.job import Job as Job
    from penstock.records.sample import Sample as Sample
    from penstock.records.sample_meta import CompletedGroup as CompletedGroup
    from penstock.workers.agents.conversation import ConversationEnvironment as ConversationEnvironment
    from penstock.workers.agents.conversation import ConversationFull as ConversationFull
    from penstock.workers.agents.tool_environment import ToolEnvironment as ToolEnvironment
    from penstock.workers.jobs.environments import Environment as Environment
    from penstock.workers.jobs.environments import Observation as Observation
    from penstock.workers.rewards.judges import Judge as Judge
    from penstock.workers.rewards.judges import Judges as Judges
    from penstock.workers.weights.receive.receive import Receiver as Receiver

#: Module -> its public names.
_PUBLIC = {
    "penstock.config": ("Config",),
    "penstock.consumers.adapters.engine_metrics": ("EngineMetrics",),
    "penstock.consumers.adapters.iterable": ("RolloutDataset",),
    "penstock.consumers.adapters.prompts": ("Request",),
    "penstock.consumers.adapters.requests": ("Requests",),
    "penstock.consumers.adapters.rollout_manager": ("RolloutManager",),
    "penstock.consumers.adapters.trl": ("TrlRollouts",),
    "penstock.consumers.adapters.verl": ("VerlRollout",),
    "penstock.consumers.batch.batch": ("Batch",),
    "penstock.consumers.grpo.trackers.trackers": ("Trackers",),
    "penstock.consumers.scorer": ("Score", "Scorer", "score"),
    "penstock.consumers.trainer": ("Trainer",),
    "penstock.consumers.weights.sender": ("Sender",),
    "penstock.consumers.weights.sources": ("Shards", "concatenated"),
    "penstock.errors": (
        "ConfigError",
        "DataEnded",
        "JudgeError",
        "OwnershipLost",
        "PenstockError",
        "RolesApart",
        "ScoreError",
        "WaitTimeout",
        "WeightsNotFinite",
    ),
    "penstock.history.row": ("SampleRow",),
    "penstock.hooks.signatures": (
        "AllSamplesHook",
        "ConvertHook",
        "EvalLogHook",
        "GenerateHook",
        "PostprocessHook",
        "RewardsHook",
        "RolloutHook",
        "RolloutLogHook",
        "SampleHook",
        "SamplesHook",
    ),
    "penstock.producer.sources.rows": ("RowSource",),
    "penstock.records.job": ("Job",),
    "penstock.records.sample": ("Sample",),
    "penstock.records.sample_meta": ("CompletedGroup",),
    "penstock.workers.agents.conversation": ("ConversationEnvironment", "ConversationFull"),
    "penstock.workers.agents.tool_environment": ("ToolEnvironment",),
    "penstock.workers.jobs.environments": ("Environment", "Observation"),
    "penstock.workers.rewards.judges": ("Judge", "Judges"),
    "penstock.workers.weights.receive.receive": ("Receiver",),
}
_LAZY = {name: module for module, names in _PUBLIC.items() for name in names}

#: Without VerlRollout, which needs verl: ``from penstock import *`` needs nothing.
__all__ = sorted({*_LAZY, "__version__"} - {"VerlRollout"})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name == _LAZY[name]:
            raise
        from penstock.system.extras import needed

        needs = needed(exc.name, trains=_LAZY[name].startswith("penstock.consumers."))
        raise ModuleNotFoundError(f"penstock.{name} needs {needs}", name=exc.name) from exc
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*_LAZY, *(name for name in globals() if name.startswith("__"))})
