"""What could hurt a run, as far as one process can see it: for ``penstock doctor``, here and on every worker."""
