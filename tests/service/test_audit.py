"""`./dev audit` fails for a known vulnerability, and never passes without having looked up every package."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "audit.py"


def judged(*packages: Mapping[str, object], out: str | None = None, err: str = "") -> tuple[int, str]:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: tuple[int, str] = module.judge(json.dumps({"dependencies": packages}) if out is None else out, err)
    return found


GOOD = {"name": "idna", "version": "3.20", "vulns": []}
BAD = {"name": "redis", "version": "8.1.0", "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["99"]}]}
UNKNOWN = {"name": "jiter", "skip_reason": "Dependency not found on PyPI"}


def test_a_known_vulnerability_fails_the_audit_even_if_other_lookups_failed() -> None:
    assert judged(GOOD, BAD, UNKNOWN) == (1, "audit FAILED, known vulnerabilities: redis 8.1.0: PYSEC-2026-1")


def test_the_audit_passes_only_if_every_package_was_looked_up() -> None:
    assert judged(GOOD, GOOD) == (0, "audit ok: no known vulnerability in 2 packages")
    code, line = judged(GOOD, UNKNOWN)
    assert code == 3
    assert line.startswith("audit SKIPPED for 1 of 2 packages (jiter")


@pytest.mark.parametrize("out", ["", "[]", "Traceback", "{}"])
def test_without_an_answer_the_audit_says_that_nothing_was_looked_up(out: str) -> None:
    code, line = judged(out=out, err="Traceback …\nConnectionError: no route\n")
    assert (code, line) == (3, "audit SKIPPED, nothing was looked up: ConnectionError: no route")
