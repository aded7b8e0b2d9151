"""Alias of ``console.cli.main``: ``python -m penstock.cli`` is the command ``penstock``."""

from console.cli.main import app as app
from console.cli.main import main as main

if __name__ == "__main__":
    main()
