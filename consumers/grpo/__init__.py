"""Train with GRPO: the reference trainer."""
