"""Sections below ``reward``: where rewards are computed, and where programs of answers run."""
