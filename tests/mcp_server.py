"""An MCP server for tests: its tools add, fail, end the server, and tell its pid."""

import os

from mcp.server.fastmcp import FastMCP

server = FastMCP("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("on purpose")


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> int:
    """Return the server's pid."""
    return os.getpid()


if __name__ == "__main__":
    server.run()
