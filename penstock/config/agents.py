"""Section ``agents``: episodes run over HTTP by agents outside the workers."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from penstock.config.section import Seconds
from penstock.config.serving import Host, TlsConfig, is_token
from penstock.text import MASK


class AgentsConfig(TlsConfig):
    """The gateway (`penstock serve`), through which agents run episodes with their existing API clients, and the
    workers behind it (docs/agents.md)."""

    section = "agents"

    #: Address on which the gateway and the workers listen; 0.0.0.0 or :: means all addresses of their machine.
    host: Host = "127.0.0.1"
    #: Port of the gateway; 0: a free port, which workers always use.
    port: Annotated[int, Field(ge=0, le=65535)] = 8900
    #: Tokens of clients by name; each client may open episodes. Set them in the environment variable
    #: PENSTOCK_AGENTS__CLIENTS. Empty: clients use the run's token, from the file ``weights.token`` in its folder.
    clients: dict[str, str] = Field(default_factory=dict)
    #: Time in seconds without a request after which an episode counts as a failed attempt of its job.
    idle_s: Seconds = 600.0
    #: SGLang's parser for tool calls in answers (``qwen25``, ``llama3``, ...); None: tool calls are returned as text.
    tool_call_parser: str | None = None
    #: SGLang's parser for reasoning in answers (``qwen3``, ``deepseek-r1``, ...); None: reasoning is returned as text.
    reasoning_parser: str | None = None

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        bad = sorted(name for name, token in self.clients.items() if token != MASK and not is_token(token))
        if bad:
            # Tokens are secret: the error does not repeat them.
            raise ValueError(
                f"the tokens of {', '.join(bad)} in agents.clients are invalid: give 16 to 256 printable characters of "
                "ASCII, without blanks"
            )
        return self
