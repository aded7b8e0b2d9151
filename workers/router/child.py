"""Run sglang-router in the engines' environment: ``python -I child.py ARGUMENTS``; imports no penstock code.

The package's launcher imports sglang, which takes seconds; this script imports only the router.
"""

import argparse


def main() -> None:
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="sglang-router", allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    arguments = RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)
    Router.from_args(arguments).start()


if __name__ == "__main__":
    main()
