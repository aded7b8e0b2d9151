"""Health checks that one process can make, for ``penstock doctor``: here and on every worker."""
