"""`lanekeeper demo`: the whole story on one machine."""

import typer

from service.cli import options
from service.cli.ending import FAILED


def demo(config: options.Config = None, sets: options.Set = None) -> None:
    """Flood the batch lane, let chats overtake it, and say how it went.

    A broker of its own and a simulated provider are started for it, and end with it. Exit code 0 only if every
    request was answered right.
    """
    from service import logs
    from service.demo.story import run

    settings = options.settings_of(config, sets)
    with logs.written(service="lanekeeper demo", level="error", format="console"):  # the table tells the rest
        all_right = run(settings)
    if not all_right:
        raise typer.Exit(FAILED)
