"""Penalties subtracted from a reward, by how an answer was generated."""

from penstock.config.reward import OverlongConfig


def overlong(num_tokens: int, config: OverlongConfig) -> float:
    """Return the Soft Overlong Punishment, from 0 to ``-factor``, of an answer of ``num_tokens`` generated tokens.

    With L = ``max_tokens`` and C = ``buffer_tokens``: 0 up to L - C, ((L - C) - num_tokens) / C up to L, then -1; times
    ``factor``. Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", equation 13.
    """
    if config.max_tokens is None:
        return 0.0
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    return -config.factor * min(max(over / config.buffer_tokens, 0.0), 1.0)
