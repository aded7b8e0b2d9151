"""``penstock top``: a run as it moves, with keys to sort and to look into what is there."""
