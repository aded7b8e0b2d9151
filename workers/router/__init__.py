"""Use several servers behind sglang-router as one engine."""
