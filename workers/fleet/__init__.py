"""Fleets: from groups of engines in one YAML to processes on one machine or on a Ray cluster."""
