"""Environments of other packages, each through the package's own classes."""
