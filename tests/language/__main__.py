"""Command line of the language check; see the package's docstring."""

import argparse
import json
import sys

from tests.language import BUDGETS, counts, excess, lowered, matches, not_imperative


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.language", description="Check the language of the code.")
    parser.add_argument("--lower", action="store_true", help="lower the budgets to the number of matches")
    parser.add_argument("--show", metavar="DIR", help="print the matches of a folder")
    options = parser.parse_args()
    if options.show:
        for path, number, text in matches():
            if path.rpartition("/")[0] == options.show:
                print(f"{path}:{number}: {text}")
        for place in not_imperative():
            if place.rpartition("/")[0] == options.show:
                print(f"{place}: D401")
        return 0
    budgets, found = json.loads(BUDGETS.read_text()), counts()
    if options.lower:
        BUDGETS.write_text(json.dumps(lowered(found, budgets), indent=1) + "\n")
    for sentence in (exceeding := excess(found, budgets)):
        print(sentence, file=sys.stderr)
    return 1 if exceeding else 0


if __name__ == "__main__":
    sys.exit(main())
