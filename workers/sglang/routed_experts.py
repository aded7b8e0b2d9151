"""Read the expert routing of each token for trainers that replay it (mixture of experts, T17).

SGLang with ``enable-return-routed-experts`` returns the routing at the end of a request for every position of the
sequence except the last token, which was not an input. Row ``i`` is the routing of position ``i`` in the forward pass
that sampled token ``i + 1``: rows of earlier requests are kept, and a request that continues a prefix adds new rows. If
a request never returned its routing (engine or worker was killed, or the job moved to another worker), its tokens are
generated again, because recomputing a prefix would give the rows of another pass.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ConfigError, EngineError
from penstock.model.folder import count_experts, read_config
from penstock.names import ROUTED_EXPERTS
from penstock.workers.engine import Rows

#: Server argument that enables the routing.
FLAG = "enable-return-routed-experts"
#: Request fields that enable the routing.
REQUEST_FIELDS = {"return_routed_experts": True}


@dataclass(frozen=True, slots=True)
class Routing:
    """Describe the shape of a model's routing."""

    layers: int
    #: Experts per token and layer, without shared experts.
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """Smallest type that fits every expert index."""
        return np.uint8 if self.num_experts <= 256 else np.int16

    def wire_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a sequence's routing in an answer: base64 of int32."""
        return num_tokens * self.layers * self.top_k * 4 * 4 // 3 + 4

    def read(self, text: Any, num_tokens: int, rid: str) -> Rows:
        """Read the expert indices [num_tokens - 1, layers, top_k] of a complete sequence of ``num_tokens``.

        Layers without experts have zeros.

        Raises:
            EngineError: the routing is missing, not base64, too short, or has expert indices out of range.
        """
        if not isinstance(text, str):
            raise EngineError(f"{rid}: the engine returned no expert routing, but rollout.sides has {ROUTED_EXPERTS}.")
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        except (binascii.Error, ValueError) as exc:
            raise EngineError(f"{rid}: the engine's {ROUTED_EXPERTS} cannot be read ({exc}).") from exc
        size = self.layers * self.top_k
        if flat.size % size or flat.size < (num_tokens - 1) * size:
            raise EngineError(
                f"{rid}: the engine's {ROUTED_EXPERTS} has {flat.size} numbers, but {num_tokens} tokens, "
                f"{self.layers} layers and {self.top_k} experts per token need {(num_tokens - 1) * size}."
            )
        rows = flat.reshape(-1, self.layers, self.top_k)[: num_tokens - 1]
        if rows.size and not 0 <= rows.min() <= rows.max() < self.num_experts:
            raise EngineError(
                f"{rid}: the engine's {ROUTED_EXPERTS} has expert "
                f"{rows.min() if rows.min() < 0 else rows.max()}, but the model has {self.num_experts} experts."
            )
        return rows.astype(self.dtype)


def routing_of(model: Mapping[str, Any], path: str) -> Routing:
    """Return the shape of a model's routing from its config.json.

    Raises:
        ConfigError: the model has no experts.
    """
    inner = model.get("text_config")
    text = inner if isinstance(inner, dict) else model
    shape = [text.get("num_hidden_layers"), text.get("num_experts_per_tok"), count_experts(text)]
    known = [value for value in shape if isinstance(value, int) and value > 0]
    if len(known) != len(shape):
        raise ConfigError(
            f"rollout.sides has {ROUTED_EXPERTS}, but model.path {path} is not a mixture of experts (its config.json "
            "lacks num_experts_per_tok or the number of experts): remove it from rollout.sides."
        )
    return Routing(*known)


def read_routing(folder: str) -> Routing:
    """Return the routing shape of the model in a folder; raises like :func:`routing_of`."""
    return routing_of(read_config(folder), folder)
