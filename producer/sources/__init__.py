"""Where rows of a dataset come from: each source is an index whose rows are read when they are taken."""
