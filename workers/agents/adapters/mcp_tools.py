"""Call tools of an MCP server, which runs as a child process of the worker during the sample.

class Files(McpEnvironment):
    command = ("python", "files_server.py")
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.system.extras import check_installed
from penstock.workers.agents.tool_environment import Tool, ToolEnvironment


class ServerLost(Exception):
    """Report that the MCP server exited or closed its output."""


class McpEnvironment(ToolEnvironment):
    """Let a model call the tools of an MCP server over standard input and output."""

    #: Program and arguments of the server.
    command: Sequence[str]
    #: Environment variables of the server, besides the few that the client passes on.
    variables: ClassVar[Mapping[str, str]] = {}
    fatal = (ServerLost,)

    async def run(self, job: Job) -> float | None:
        """Start the server, run the sample, and stop the server."""
        check_installed("mcp", "An MCP server")
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *arguments = self.command
        server = StdioServerParameters(command=program, args=arguments, env=dict(self.variables))
        reward: float | None = None
        failure: Exception | None = None
        async with stdio_client(server) as (reads, writes), ClientSession(reads, writes) as session:
            self._session = session
            await session.initialize()
            try:
                reward = await super().run(job)
            except Exception as exc:  # raised below, because the client would wrap it in an exception group
                failure = exc
        if failure is not None:
            raise failure
        return reward

    async def list_tools(self, job: Job) -> Sequence[Tool]:
        """Return the server's tools; override to offer fewer."""
        tools, cursor = [], None
        while True:
            page = await self._session.list_tools(cursor)
            tools += page.tools
            if (cursor := page.nextCursor) is None:
                return [_schema(tool) for tool in tools]

    async def call(self, name: str, arguments: dict[str, Any], sample: Sample) -> str:
        """Return the result of a call as text; errors of the tool are results too. Raises ServerLost."""
        from mcp import McpError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._session.call_tool(name, arguments)
        except McpError as exc:
            if exc.error.code == CONNECTION_CLOSED:
                raise ServerLost(f"the MCP server {' '.join(self.command)} exited during a call of {name}") from exc
            raise
        return "\n".join(part.text if part.type == "text" else f"({part.type})" for part in result.content)


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.inputSchema}
    return {"type": "function", "function": function}
