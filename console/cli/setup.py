"""``penstock init`` and ``penstock engine install``: a first run in a folder, and the environment of its engine."""

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from penstock.console.terminal import say
from penstock.errors import ConfigError
from penstock.system.extras import check_installed

_HEAD = """\
# Sort five digits: a policy of 362k parameters learns it from the answers of a real SGLang server.
#
#     penstock check run.yaml
#     penstock run run.yaml
#
# Paths are relative to this file. Any key can be overridden: `--trainer.steps=20`, PENSTOCK_TRAINER__STEPS=20.
"""

engine_app = typer.Typer(help="The Python environment of SGLang.")


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to write to.")] = Path(),
) -> None:
    """Write a first run that works on this machine: run.yaml, a reward, a dataset and a small model. Takes 20 s."""
    from penstock.config.engine import preset_of_machine

    for package in ("torch", "transformers", "safetensors"):
        check_installed(package, "`penstock init`, which trains a small model,")
    written = [folder / name for name in ("run.yaml", "reward.py", "data")]
    if existing := [path for path in written if path.exists()]:
        raise ConfigError(f"{existing[0]} exists already, and nothing is overwritten: name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("penstock.console.first_run")
    say("making a dataset, and training a small model until it is right sometimes (about 20 s)")
    from penstock.console.first_run.digits import Settings, prepare

    say(prepare(folder / "data", Settings()))
    (folder / "reward.py").write_text((templates / "reward.py").read_text())
    (folder / "run.yaml").write_text(run_yaml((templates / f"{preset_of_machine()}.yaml").read_text()))
    say(f"Now: cd {folder.absolute()} && penstock run run.yaml")


def run_yaml(example: str) -> str:
    """Return the configuration of the digits example for a folder that has its data, model and reward already."""
    text = re.sub(r"(# Writes data.*\n)?prepare: .*\n", "", example[example.index("run: ") :])
    text = re.sub(r"^run: .*", "run: digits", text)
    return _HEAD + text.replace("function: exact_match", "function: reward:is_sorted")


@engine_app.callback()
def _engine() -> None:
    """Manage the Python environment of SGLang."""


@engine_app.command()
def install(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder to create; by default one where penstock finds it.")
    ] = None,
) -> None:
    """Create the environment of SGLang on CPUs (x86-64; 2 minutes, 2.8 GB). For GPUs follow SGLang's own guide."""
    from penstock.config.engine import engine_folders

    target = folder or engine_folders()[-1]
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"installing SGLang for CPUs in {target} (about 2 minutes, 2.8 GB)")
    script = Path(__file__).parents[2] / "workers" / "engine_env" / "install.sh"
    done = subprocess.run(["bash", script, target], env=os.environ | {"PYTHON": sys.executable}, check=False)
    if done.returncode:
        raise ConfigError(f"the environment of SGLang could not be installed in {target}; the output above says why.")
    if target not in engine_folders():
        say(f"Set engine.python to {target / 'bin' / 'python'}.")
