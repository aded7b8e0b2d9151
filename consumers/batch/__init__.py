"""Turn a cut batch into arrays for a trainer: read, check, lay out, record."""
