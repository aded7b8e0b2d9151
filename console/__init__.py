"""What a person starts and looks at: the command line, and the launcher of a run on this machine."""

from penstock.system.own_packages import missing


def __getattr__(name: str) -> None:
    raise missing(__name__, name)
