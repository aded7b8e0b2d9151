"""Section ``agents``: episodes that agents outside the workers run over HTTP."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from penstock.config.section import Seconds
from penstock.config.serving import Host, TlsConfig, is_token
from penstock.text import MASK


class AgentsConfig(TlsConfig):
    """The gateway (`penstock serve`), by which agents run episodes through APIs that they already use, and the workers
    behind it (docs/agents.md)."""

    section = "agents"

    #: Address that the gateway and the workers listen on; 0.0.0.0 or :: for every one of their machine.
    host: Host = "127.0.0.1"
    #: Port of the gateway; 0 takes a free one, as workers always do.
    port: Annotated[int, Field(ge=0, le=65535)] = 8900
    #: Tokens of clients by name; each may open episodes. Give them in the environment, as PENSTOCK_AGENTS__CLIENTS.
    #: Empty: the token of the run, in the file ``weights.token`` of its folder.
    clients: dict[str, str] = Field(default_factory=dict)
    #: An episode without a request for so long is a failed attempt of its job.
    idle_s: Seconds = 600.0
    #: SGLang's parser of tool calls in answers (``qwen25``, ``llama3``, ...); None: answers are text.
    tool_call_parser: str | None = None
    #: SGLang's parser of reasoning in answers (``qwen3``, ``deepseek-r1``, ...); None: reasoning is text.
    reasoning_parser: str | None = None

    @model_validator(mode="after")
    def _tokens_are_tokens(self) -> Self:
        bad = sorted(name for name, token in self.clients.items() if token != MASK and not is_token(token))
        if bad:
            # They are secret: they are not repeated.
            raise ValueError(
                f"the tokens of {', '.join(bad)} in agents.clients are invalid: give 16 to 256 printable characters of "
                "ASCII, without blanks"
            )
        return self
