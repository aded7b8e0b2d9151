"""What is taken off a reward for how an answer came about."""

from penstock.config.reward import OverlongConfig


def overlong(num_tokens: int, config: OverlongConfig) -> float:
    """Soft Overlong Punishment, from 0 to ``-factor``, for an answer of ``num_tokens`` drawn tokens.

    With L = ``max_tokens`` and C = ``buffer_tokens``: 0 up to L - C, ((L - C) - num_tokens) / C up to L, then -1; times
    ``factor``. Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", equation 13.
    """
    if config.max_tokens is None:
        return 0.0
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    return -config.factor * min(max(over / config.buffer_tokens, 0.0), 1.0)
