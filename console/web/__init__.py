"""The web page of the runs in a folder (``penstock web``): the data of the command line, as JSON and as a page.

Read-only, unless actions were enabled; listens on loopback only (``guard.py``). All data come from the readers of the
command line: ``penstock.console.read`` and ``penstock.console.launch.observer``.
"""
