"""The command line: one file per family of verbs, each prints words or JSON."""
