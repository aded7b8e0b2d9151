"""The files that `penstock init` writes, linked from examples/digits, and the reward it adds."""
