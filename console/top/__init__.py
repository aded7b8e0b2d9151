"""``penstock top``: an interactive live view of a run."""
