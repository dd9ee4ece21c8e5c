"""Calls that schemathesis makes up of an OpenAPI document, each answer compared with the document.

The same calls each time. Run it in a thread: it calls without asyncio.
"""

from collections.abc import Collection
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)
DELAYS = frozenset({"x-lane-delay-ms", "x-lane-at"})


def make_up(url: str, *, paths: Collection[str], examples: int) -> int:
    """Raises for an answer that the document does not describe, and for every 500. Returns how many calls were made."""
    load_all_checks()
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    made = 0
    for found in document.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if operation.path not in paths:
            continue

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            nonlocal made
            made += 1
            case.headers = {name: each for name, each in (case.headers or {}).items() if name not in DELAYS}
            answer = case.call(timeout=60)
            assert answer.status_code != 500, answer.text
            case.validate_response(answer, checks=CHECKS)

        call()
    return made
