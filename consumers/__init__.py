"""Trainer client, batches, advantages, corrections, publication, the reference GRPO trainer."""
