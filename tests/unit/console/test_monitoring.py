"""Dashboard and alert rules ask for what the parts serve, and for nothing else."""

import json
import re
from pathlib import Path

import yaml

from tests.reference.metrics import all_series

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "console" / "monitoring"
#: What Prometheus itself adds to each target.
OWN = {"up"}
_SERIES = re.compile(r"\b((?:penstock|rollout|perf|eval)_\w+|eval|up)\b(?=\s*[{\[)=>/<]|\s*$|\s+[a-z])")


def test_dashboard_and_alerts_ask_for_series_that_are_served() -> None:
    served = {name for one in all_series() for name in (one.shown_as, f"{one.name}_sum", f"{one.name}_count")} | OWN

    asked = {name for query in (*dashboard_queries(), *alert_queries()) for name in _SERIES.findall(query)}

    assert len(asked) > 50
    assert asked - served == set()


def test_every_query_of_the_dashboard_is_of_the_chosen_run() -> None:
    assert [query for query in dashboard_queries() if 'run="$run"' not in query] == []


def dashboard_queries() -> list[str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]
