"""Journeys are seldom about delays, so they declare few delay levels."""

import pytest

from tests.support.chromium import PROGRAM
from tests.support.packages import see_that_it_is_installed


@pytest.fixture(autouse=True)
def _few_delay_levels(few_delay_levels: None) -> None:
    """See `few_delay_levels` in tests/conftest.py."""


@pytest.fixture
def chromium() -> None:
    """See that Debian's Chromium is installed. If that is impossible, the test is skipped; in CI it fails."""
    see_that_it_is_installed(PROGRAM)
