"""Chores of the leader, each by itself; `buffer/housekeeping.py` says when."""
