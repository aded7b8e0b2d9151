"""Buffer process: collects completed groups, cuts batches and retires groups."""

if __name__ != "penstock.buffer":
    raise ImportError("Import penstock.buffer: the package buffer is part of penstock.")
