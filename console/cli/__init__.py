"""The command line: one file per family of commands, each prints words or JSON."""
