"""`lanekeeper settings`: the value of every setting, and where it comes from."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.answers import print_json, printable

if TYPE_CHECKING:
    from service.config.effective import Effective


def settings(
    given: Annotated[bool, typer.Option("--given", help="Show only settings that some source has set.")] = False,
    json: options.Json = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Show every setting in effect, and where it comes from: default, a file, the environment, an option.

    Keys, and passwords in URLs, are hidden. docs/settings.md says what each does.

    Example:  lanekeeper settings --set lanes.batch.slots=12 --given
    """
    from service.config.effective import DEFAULT, effective
    from service.config.loading import load_with_sources

    found, sources = load_with_sources(config, **options.given_by(sets, {}))
    shown = [setting for setting in effective(found, sources) if not given or setting.source != DEFAULT]
    if json:
        print_json([asdict(setting) for setting in shown])
    else:
        _show(shown)


def _show(shown: "list[Effective]") -> None:
    width = max((len(setting.name) for setting in shown), default=0)
    values = [printable(text_of(setting.value)) for setting in shown]
    wide = min(60, max(map(len, values), default=0))
    for setting, value in zip(shown, values, strict=True):
        print(f"{setting.name:<{width}}  {value:<{wide}}  {setting.source}")


def text_of(value: Any) -> str:
    """A setting's value as text on one line: `-` for None, JSON for lists and tables."""
    from json import dumps

    if value is None:
        return "-"
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)
