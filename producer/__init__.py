"""Data sources, chat templates, the gate, admission."""

if __name__ != "penstock.producer":
    raise ImportError("Import penstock.producer: the package producer is part of penstock.")
