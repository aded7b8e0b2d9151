"""Rollout workers: main loop, engine, weights, generation, environments, rewards."""

from penstock.system.own_packages import missing


def __getattr__(name: str) -> None:
    raise missing(__name__, name)
