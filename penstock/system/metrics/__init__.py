"""Metrics that Prometheus scrapes: what a series is, the server of one part, and where those of a run are."""
