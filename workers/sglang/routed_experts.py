"""Which experts of a mixture of experts saw each token, for trainers that replay the routing (T17).

SGLang started with ``enable-return-routed-experts`` returns it at the end of a request, for every position of the whole
sequence but the last token, which was never fed. Row ``i`` is where position ``i`` went in the forward pass that
token ``i + 1`` was drawn from: what earlier requests returned of a sample is kept, and a request that goes on
from a prefix adds what is new. Tokens whose request did not live to return it (its engine or worker was killed, or the
job went to another worker) are drawn anew: rows of a prefix that is computed again are those of another pass.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError, EngineError
from penstock.names import ROUTED_EXPERTS
from penstock.weights.model_folder import count_experts, read_config
from penstock.workers.engine import Rows

#: Argument of the server without which it returns nothing.
FLAG = "enable-return-routed-experts"
#: Fields of a request that asks for it.
ASK = {"return_routed_experts": True}


@dataclass(frozen=True, slots=True)
class Routing:
    """Shape of what a model's layers route."""

    layers: int
    #: Experts that a layer sends a token to; shared ones are not counted.
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """The smallest that holds every expert's number."""
        return np.uint8 if self.num_experts <= 256 else np.int16

    def wire_bytes(self, num_tokens: int) -> int:
        """Most bytes of an answer that hold the routing of a sequence: base64 of int32."""
        return num_tokens * self.layers * self.top_k * 4 * 4 // 3 + 4

    def read(self, text: Any, num_tokens: int, rid: str) -> Rows:
        """[num_tokens - 1, layers, top_k] numbers of experts, from an answer whose whole sequence has ``num_tokens``.

        Layers without experts have zeros.

        Raises:
            EngineError: it is not there, is not base64, has too few rows, or names experts that do not exist.
        """
        if not isinstance(text, str):
            raise EngineError(
                f"{rid}: the engine did not say which experts it used, and rollout.sides asks for {ROUTED_EXPERTS}."
            )
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        except (binascii.Error, ValueError) as exc:
            raise EngineError(f"{rid}: the engine's {ROUTED_EXPERTS} cannot be read ({exc}).") from exc
        size = self.layers * self.top_k
        if flat.size % size or flat.size < (num_tokens - 1) * size:
            raise EngineError(
                f"{rid}: the engine's {ROUTED_EXPERTS} has {flat.size} numbers, where {num_tokens} tokens, "
                f"{self.layers} layers and {self.top_k} experts a token need {(num_tokens - 1) * size}."
            )
        rows = flat.reshape(-1, self.layers, self.top_k)[: num_tokens - 1]
        if rows.size and not 0 <= rows.min() <= rows.max() < self.num_experts:
            raise EngineError(
                f"{rid}: the engine's {ROUTED_EXPERTS} names expert "
                f"{rows.min() if rows.min() < 0 else rows.max()}, and the model has {self.num_experts}."
            )
        return rows.astype(self.dtype)


def routing_of(model: Mapping[str, Any], path: str) -> Routing:
    """What a model routes, from its config.json.

    Raises:
        ConfigError: it has no experts.
    """
    inner = model.get("text_config")
    text = inner if isinstance(inner, dict) else model
    shape = [text.get("num_hidden_layers"), text.get("num_experts_per_tok"), count_experts(text)]
    known = [value for value in shape if isinstance(value, int) and value > 0]
    if len(known) != len(shape):
        raise ConfigError(
            f"rollout.sides asks for {ROUTED_EXPERTS}, and model.path {path} is not a mixture of experts (its "
            "config.json lacks num_experts_per_tok or the number of experts): leave it out of rollout.sides."
        )
    return Routing(*known)


def read_routing(folder: str) -> Routing:
    """What the model in a folder routes; raises as :func:`routing_of`."""
    return routing_of(read_config(folder), folder)
