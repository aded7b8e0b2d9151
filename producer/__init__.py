"""Producer process: reads datasets and admits jobs."""

if __name__ != "penstock.producer":
    raise ImportError("Import penstock.producer: the package producer is part of penstock.")
