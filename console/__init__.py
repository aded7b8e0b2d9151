"""User-facing programs: the command line, the web page, and the launcher of a run on this machine."""

if __name__ != "penstock.console":
    raise ImportError("Import penstock.console: the package console is part of penstock.")
