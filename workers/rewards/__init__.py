"""Rewards of samples: computed here or by the verifier pool."""
