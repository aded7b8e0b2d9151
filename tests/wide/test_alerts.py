"""The alert rules by Prometheus' own test of rules: each fires after its real ``for:`` and not before."""

import subprocess
from pathlib import Path

import yaml

from tests.wide.prometheus import MONITORING, program

CASES = Path(__file__).with_name("alerts_test.yml")


def promtool(*words: str) -> str:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(MONITORING / "alerts.yml"))


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    cases = yaml.safe_load(CASES.read_text()) | {"rule_files": [str(MONITORING / "alerts.yml")]}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))

    promtool("test", "rules", str(tmp_path / "cases.yml"))


def test_each_alert_is_tried_both_ways() -> None:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    names = {rule["alert"] for group in groups for rule in group["rules"]}
    tried = [case for one in yaml.safe_load(CASES.read_text())["tests"] for case in one["alert_rule_test"]]

    assert {case["alertname"] for case in tried if case["exp_alerts"]} == names
    assert {case["alertname"] for case in tried if not case["exp_alerts"]} == names
