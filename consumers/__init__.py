"""Trainer client, batches, advantages, corrections, publication, the reference GRPO trainer."""

if __name__ != "penstock.consumers":
    raise ImportError("Import penstock.consumers: the package consumers is part of penstock.")
