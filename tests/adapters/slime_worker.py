"""``penstock worker`` on a machine where slime is installed: ``python -m tests.adapters.slime_worker worker ...``.

``SLIME_SOURCE`` names slime's checkout. Its examples are on the path, as their scripts put them there. Packages of
slime's that are not installed are stand-ins (slime_source.py); its HTTP client is a real one.
``SLIME_SEARCH_URL`` is the address that search-r1 is configured to search at.
"""

import importlib
import os
import sys

import httpx2

from penstock.cli import main
from tests.adapters import slime_source

#: Folders below the checkout that the examples' scripts have on PYTHONPATH.
FOLDERS = ("examples/retool", "examples/search-r1")


def install(source: str) -> None:
    """Make slime and its examples importable."""
    # Penstock's own imports first, which the stand-ins must not reach.
    importlib.import_module("penstock.workers.main")
    slime_source.stand_in(source)
    sys.modules["httpx"] = httpx2
    sys.path[:0] = [os.path.join(source, folder) for folder in FOLDERS]
    search = importlib.import_module("generate_with_search")
    search.SEARCH_R1_CONFIGS["local"]["search_url"] = os.environ.get("SLIME_SEARCH_URL", "")


if __name__ == "__main__":
    install(os.environ["SLIME_SOURCE"])
    sys.exit(main())
