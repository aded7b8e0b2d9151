"""Find out whether this machine has a jail, for processes that must not fork because they have threads.

``python -m penstock.workers.rewards.jail.probe CONFIG`` prints the result as JSON.
"""

import json
import os
import subprocess
import sys

from penstock.config import RewardConfig
from penstock.errors import ConfigError
from penstock.system.processes import python_command, python_environment
from penstock.workers.rewards.jail.detect import find_jail

#: Longest wait for the result, even on a busy machine.
_ASK_S = 300


def check_jail(config: RewardConfig) -> str:
    """Describe the jail for programs of answers on this machine. Blocks for about a second.

    Raises:
        ConfigError: no jail that the configuration allows works here.
    """
    command = python_command("penstock.workers.rewards.jail.probe", config.model_dump_json(include={"code", "jail"}))
    try:
        done = subprocess.run(
            command, env=python_environment(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ASK_S, check=True,
        )  # fmt: skip
    except subprocess.SubprocessError as exc:
        raise ConfigError(f"reward.jail: failed to find out whether this machine has a jail ({exc}).") from exc
    found = json.loads(done.stdout)
    if "error" in found:
        raise ConfigError(found["error"])
    return str(found["jail"])


def main(config: RewardConfig) -> None:
    """Print the result."""
    try:
        jail = find_jail(config)
        found = {"jail": jail.describe()}
        jail.close()
    except ConfigError as exc:
        found = {"error": str(exc)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(RewardConfig.model_validate_json(sys.argv[1]))
