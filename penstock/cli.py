"""Alias of ``penstock.console.cli.main``: ``python -m penstock.cli`` is the command ``penstock``."""

from penstock.console.cli.main import app as app
from penstock.console.cli.main import main as main

if __name__ == "__main__":
    main()
