"""``penstock run``: check, place, start, watch and end the parts of a run on this machine."""
