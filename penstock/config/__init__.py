"""The configuration of a run: its sections, and how it is read and validated."""

from penstock.config.buffer import BufferConfig, FilterConfig
from penstock.config.data import DataConfig, DatasetConfig
from penstock.config.engine import EngineConfig
from penstock.config.hooks import HooksConfig
from penstock.config.redis import RedisConfig
from penstock.config.reward import RewardConfig
from penstock.config.rollout import RolloutConfig
from penstock.config.run import Config, DebugConfig, HistoryConfig, ModelConfig
from penstock.config.serving import ServingConfig
from penstock.config.staleness import StalenessConfig
from penstock.config.trainer import TrainerConfig
from penstock.config.worker import WorkerConfig

__all__ = [
    "BufferConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "DebugConfig",
    "EngineConfig",
    "FilterConfig",
    "HistoryConfig",
    "HooksConfig",
    "ModelConfig",
    "RedisConfig",
    "RewardConfig",
    "RolloutConfig",
    "ServingConfig",
    "StalenessConfig",
    "TrainerConfig",
    "WorkerConfig",
]
