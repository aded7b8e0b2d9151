"""Metrics for Prometheus: series, the server of one process, and the list of a run's servers."""
