"""Turn a cut batch into what a trainer gets: read, check, lay out, record."""
