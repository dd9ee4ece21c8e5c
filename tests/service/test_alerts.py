"""The alerts: each fires for its cause, is about metrics that exist, and has a paragraph in the runbook."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.engine import see_that_it_is_installed

HOUSE = Path(__file__).parents[2]
RULES = HOUSE / "deploy" / "prometheus" / "rules.yml"
BOARD = HOUSE / "deploy" / "grafana" / "dashboards" / "lanekeeper.json"
METRIC = re.compile(r"\b(?:lanekeeper|gen_ai|db_client|messaging)_[a-z_]+")


@pytest.mark.slow
def test_kubernetes_is_asked_for_more_workers_only_while_they_are_the_bottleneck() -> None:
    see_that_it_is_installed("prometheus")
    rules = RULES.with_name("scaling_test.yml")
    done = subprocess.run(["promtool", "test", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_alert_fires_for_its_cause_and_a_healthy_system_is_silent() -> None:
    see_that_it_is_installed("prometheus")
    done = subprocess.run(
        ["promtool", "test", "rules", str(RULES.with_name("rules_test.yml"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_paragraph_in_the_runbook() -> None:
    titles = set(re.findall(r"^## (\w+)$", (HOUSE / "docs" / "runbook.md").read_text(), re.MULTILINE))
    linked = {each["annotations"]["runbook"].rpartition("#")[2] for each in alerts()}
    assert linked == {title.lower() for title in titles}


def test_alerts_and_dashboard_ask_for_documented_metrics() -> None:
    board = json.loads(BOARD.read_text())
    asked = [each["expr"] for each in alerts()]
    asked += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    documented = set(METRIC.findall((HOUSE / "docs" / "metrics.md").read_text()))
    documented |= {f"{name}_{part}" for name in documented for part in ("sum", "count", "bucket")}
    used = {name for expr in asked for name in METRIC.findall(expr)}
    assert used - documented <= {"lanekeeper_waiting", "lanekeeper_failure_ratio"}, "recorded by the rules themselves"


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]
