"""``python -m tests.chaos.defects``."""

import sys

from tests.chaos.defects import main

sys.exit(main(sys.argv[1:]))
