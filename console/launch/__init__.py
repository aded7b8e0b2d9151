"""``penstock run``: the parts of a run on this machine, from what can be known before to what is left."""
