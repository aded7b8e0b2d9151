"""Run rollout workers: main loop, engine, weights, generation, environments, rewards."""

if __name__ != "penstock.workers":
    raise ImportError("Import penstock.workers: the package workers is part of penstock.")
