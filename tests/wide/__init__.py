"""Tests with programs of others, larger than a developer needs at hand (`make test-wide`)."""
