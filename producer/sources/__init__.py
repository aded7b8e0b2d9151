"""Sources of datasets: each is an index whose rows are read when they are taken."""
