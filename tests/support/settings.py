"""Loads settings from a test's own file and environment, or returns the error's text if they are wrong."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lanekeeper.contract.problems import SettingsError
from service.config.loading import load_settings
from service.config.settings import Settings
from topology.lanes import LaneSpec


def load(toml: str | Path | None = None, *, env: Mapping[str, str] | None = None, **options: Any) -> Settings:
    """`toml`: a file, or what is written into one."""
    config = toml if isinstance(toml, Path) else None
    if isinstance(toml, str):
        config = Path("given.toml")
        config.write_text(toml)
    with patch.dict(os.environ, env or {}, clear=True):
        return load_settings(config, **options)


def wrong(toml: str | None = None, *, env: Mapping[str, str] | None = None, **options: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(toml, env=env, **options)
    assert caught.value.__cause__ is None, "a cause would bring the values into a traceback"
    return str(caught.value)


def lane(settings: Settings, name: str) -> LaneSpec:
    return next(each for each in settings.lane_specs() if each.name == name)
