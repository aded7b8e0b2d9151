"""Run programs written by a model: isolated, bounded, and removed afterwards."""
