"""Trainer client, batches, advantages, corrections, publication, the reference GRPO trainer."""

from penstock.system.own_packages import missing


def __getattr__(name: str) -> None:
    raise missing(__name__, name)
