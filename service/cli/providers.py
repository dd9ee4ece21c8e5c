"""`lanekeeper providers …`: which providers are called, and a probe of one that is paused."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.process import connected, print_json, printable, run

if TYPE_CHECKING:
    from service.config.settings import Settings
    from service.status import Probed

app = typer.Typer(no_args_is_help=True, help="Providers: which are called, which are paused and why; probe one now.")


@app.command("list")
@options.with_settings
def every(settings: "Settings", json: options.Json = False) -> None:
    """List the workers' providers: whether they are called, paused, or have open circuit breakers.

    Example:  lanekeeper providers list --json
    """
    found = told(run(_answers(settings)))
    if json:
        print_json(found)
    else:
        print("\n".join(provider_line(name, provider) for name, provider in found.items()) or "no worker answers")


@app.command("probe")
@options.with_settings
def probe(
    settings: "Settings",
    name: Annotated[str, typer.Argument(metavar="NAME", help="The provider's name.")],
    json: options.Json = False,
) -> None:
    """Let all workers probe a paused provider now, and tell how it went. Ends with 1 if it stays paused.

    Example:  lanekeeper providers probe anthropic
    """
    found = run(_probe(settings, name))
    if found is None:
        raise typer.BadParameter(f"no worker has a provider {name!r}", param_hint="NAME")
    if json:
        print_json({"provider": found.provider, "state": found.state, "workers": found.workers})
    else:
        print("\n".join(_of_worker(name, worker, each) for worker, each in sorted(found.workers.items())))
    if found.state in ("paused", "probing"):
        raise typer.Exit(1)


def told(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the workers tell of each provider."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(lambda: {"workers": 0, "paused": [], "breakers": {}})
    for answer in answers:
        for name in answer.get("providers", ()):
            found[name]["workers"] += 1
            if (pause := answer.get("paused", {}).get(name)) is not None:
                found[name]["paused"].append({"worker": answer.get("worker", "?"), **pause})
        for which, breaker in answer.get("breakers", {}).items():
            name, _, model = which.partition(" ")
            found[name]["breakers"][model] = breaker
    return dict(sorted(found.items()))


def provider_line(name: str, provider: Mapping[str, Any]) -> str:
    """One line of text about a provider."""
    from service.status import breaker_text

    paused = provider["paused"]
    state = f"called by {provider['workers']} workers"
    if paused:
        longest = max(paused, key=lambda each: each["for_s"])
        state = (
            f"paused by {len(paused)} of {provider['workers']} workers, for {longest['for_s']:.0f} s: "
            f"{longest['reason']} ({longest['error']}); probed again in {longest['probe_in_s']:.0f} s"
        )
    breakers = "".join(
        f"; breaker of {model}: {breaker_text(breaker)}" for model, breaker in provider["breakers"].items()
    )
    return printable(f"{name}: {state}{breakers}")


def _of_worker(name: str, worker: str, found: Mapping[str, str]) -> str:
    words = {
        "called": "was not paused",
        "resumed": "is called again",
        "paused": f"stays paused: {found.get('reason')} ({found.get('error')})",
        "probing": "has not answered its probe yet",
        "unknown": "is not known there",
    }
    return printable(f"{worker}: {name} {words.get(found['state'], found['state'])}")


async def _answers(settings: "Settings") -> Sequence[Mapping[str, Any]]:
    from service.status import gather

    async with connected(settings, "providers") as connection:
        return await gather(connection, names=settings.names())


async def _probe(settings: "Settings", name: str) -> "Probed | None":
    from service.status import probe_provider

    async with connected(settings, "providers") as connection:
        return await probe_provider(connection, name, names=settings.names(), user=settings.credentials[0])
