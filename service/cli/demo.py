"""`lanekeeper demo`: show on one machine what Lanekeeper promises."""

import typer

from service.cli import options
from service.cli.ending import FAILED


def demo(config: options.Config = None, sets: options.Set = None) -> None:
    """Flood the batch lane, let chats overtake it, spend a small budget, and print the results.

    It starts its own broker and simulated providers, and stops them at the end. The exit code is 0 only if every
    request was answered right and every act kept its promise."""
    from service.demo.story import run
    from service.telemetry import logs

    settings = options.settings_of(config, sets)
    with logs.configured(service="lanekeeper demo", level="error", format="console"):  # the table shows everything else
        is_well = run(settings)
    if not is_well:
        raise typer.Exit(FAILED)
