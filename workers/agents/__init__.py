"""Run samples with agents outside the workers over HTTP, and with environments that use chat messages."""
