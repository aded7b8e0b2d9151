"""Rollout workers: main loop, engine, weights, generation, environments, rewards."""
