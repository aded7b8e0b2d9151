"""Where things lie in this checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What a Python process has first on its path that is to be recorded.
RECORDED = Path(__file__).parent / "recording" / "recorded"
#: What is kept of runs.
RESULTS = ROOT / "benchmarks" / "results" / "chaos"
