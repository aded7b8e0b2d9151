"""Check whether a server that penstock did not start can serve a run."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.redaction import redact
from penstock.workers.sglang.command import refuse_hiding


def check_external(url: str, info: Mapping[str, Any], served: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse an external server with another model, or with options that do not fit.

    Host, devices, paths and parallelism may differ from the worker's.

    Args:
        info: its /server_info.
        served: its /model_info.
        model: config.json of ``model.path``.

    Raises:
        ConfigError: it cannot serve this run; the message says what to change.
    """
    server = f"engine.url {redact(url)}"
    ours, theirs = (set(map(str, one.get("architectures") or ())) for one in (model, served))
    if ours and theirs and not ours & theirs:
        raise ConfigError(
            f"{server} serves {', '.join(sorted(theirs))} from {served.get('model_path')}, and model.path holds "
            f"{', '.join(sorted(ours))}: name the model that is served."
        )
    if served.get("is_generation") is False:
        raise ConfigError(f"{server} serves a model that does not generate: start it without is-embedding.")
    for name, why in _MUST_BE_OFF.items():
        if info.get(name) or served.get(name):
            raise ConfigError(f"{server} was started with {name.replace('_', '-')}, {why}: start it without.")
    refuse_hiding(server, info)


_MUST_BE_OFF = {
    "skip_tokenizer_init": "and cannot see stop strings",
    "allow_auto_truncate": "and would answer other prompts than it was given",
    "preferred_sampling_params": "and would not sample as requested",
}
