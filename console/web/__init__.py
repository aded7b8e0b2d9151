"""The page of the runs in a folder (``penstock web``): what the command line reads, as JSON and as a page of it.

Reads alone, unless actions were allowed; listens on loopback alone (``guard.py``). Everything that is shown comes from
the readers of the command line: ``penstock.console.read`` and ``penstock.console.launch.report``.
"""
