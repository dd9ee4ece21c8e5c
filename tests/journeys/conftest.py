"""Journeys are seldom about delays, so they declare few delay levels."""

import pytest


@pytest.fixture(autouse=True)
def _few_delay_levels(few_delay_levels: None) -> None:
    """See `few_delay_levels` in tests/conftest.py."""
