"""`lanekeeper check`: find out what is wrong, and how to correct it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lanekeeper.contract.problems import SettingsError
from service.cli import options
from service.cli.answers import print_json
from service.cli.ending import FAILED, run

if TYPE_CHECKING:
    from service.checks.providers import Finding
    from service.config.settings import Settings

WORDS = {True: "ok", False: "wrong", None: "-"}


def check(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="As for `serve --simulate`: no provider needed.")
    ] = False,
    json: options.Json = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Check settings, broker, topology, permissions, providers and stores; exit code 1 if anything is wrong.

    Each provider is called once for each model that the lanes use there, for an answer of one token. If all running
    workers have a simulated provider, no provider is called. For a user that may only publish, only that right is
    checked.

    Example:  lanekeeper check --set namespace=staging
    """
    from service.checks.providers import Finding

    try:
        settings = options.settings_of(config, sets)
    except SettingsError:
        _show([Finding("settings", False, _all_that_is_wrong(config, sets))], json=json)
        raise typer.Exit(FAILED) from None
    run(_check(settings, simulate=simulate, json=json))


def _all_that_is_wrong(config: Path | None, sets: list[str] | None) -> str:
    """The error message that names all wrong settings, including missing keys of providers; empty if none is wrong.
    This function is called only if a setting other than a key is wrong; if only keys are missing, the check of each
    provider reports the key that it lacks."""
    try:
        options.settings_of(config, sets, for_calls=True)
    except SettingsError as error:
        return str(error)
    return ""


async def _check(settings: "Settings", *, simulate: bool, json: bool) -> None:
    from service.checks.run import look
    from service.telemetry import logs

    findings = []
    with logs.configured(service="lanekeeper", level="critical"):
        async for finding in look(settings, simulate=simulate):
            findings.append(finding)
            if not json:
                _show([finding], json=False)
    if json:
        _show(findings, json=True)
    if any(finding.well is False for finding in findings):
        raise typer.Exit(FAILED)


def _show(findings: list["Finding"], *, json: bool) -> None:
    if json:
        print_json([asdict(finding) for finding in findings])
        return
    for finding in findings:
        print(f"{WORDS[finding.well]:<5}  {finding.what:<18} {finding.text}", flush=True)
