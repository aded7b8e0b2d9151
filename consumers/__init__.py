"""Train on a run's batches: trainer client, batches, advantages, publication, the reference GRPO trainer."""

if __name__ != "penstock.consumers":
    raise ImportError("Import penstock.consumers: the package consumers is part of penstock.")
