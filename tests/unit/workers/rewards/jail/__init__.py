"""Tests of the jail that need none."""
