"""Stands where checkpoint-engine would be on machines without a GPU, for processes of tests that find it on their path.

The calls, the process group, the names and the messages of its sockets are those of 0.4.2; what travels is bytes, where
the real one hands over GPU memory.
"""
