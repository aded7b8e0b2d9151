"""The reference trainer: GRPO."""
