"""`lanekeeper check`: what is wrong and how to mend it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from service.cli import options
from service.cli.ending import FAILED, run
from topology.contract.problems import SettingsError

if TYPE_CHECKING:
    from service.provider_checks import Finding
    from service.settings import Settings


def check(json: options.Json = False, config: options.Config = None, sets: options.Set = None) -> None:
    """Look at settings, broker, topology, permissions, providers and store; exit code 1 if anything is wrong.

    Each provider is asked for one token of each model that the lanes ask it for.

    Example:  lanekeeper check --set namespace=staging
    """
    from service.provider_checks import Finding

    try:
        settings = options.settings_of(config, sets)
    except SettingsError:
        _show([Finding("settings", False, _all_that_is_wrong(config, sets))], json=json)
        raise typer.Exit(FAILED) from None
    run(_check(settings, json=json))


def _all_that_is_wrong(config: Path | None, sets: list[str] | None) -> str:
    """With the providers' keys that are missing: where nothing else is wrong each is a finding of its own."""
    try:
        options.settings_of(config, sets, for_calls=True)
    except SettingsError as error:
        return str(error)
    return ""


async def _check(settings: "Settings", *, json: bool) -> None:
    from service import logs
    from service.checks import look

    findings = []
    with logs.written(service="lanekeeper", level="critical"):
        async for finding in look(settings):
            findings.append(finding)
            if not json:
                _show([finding], json=False)
    if json:
        _show(findings, json=True)
    if not all(finding.well for finding in findings):
        raise typer.Exit(FAILED)


def _show(findings: list["Finding"], *, json: bool) -> None:
    if json:
        from json import dumps

        print(dumps([asdict(finding) for finding in findings], indent=2))
        return
    for finding in findings:
        print(f"{'ok   ' if finding.well else 'wrong'}  {finding.what:<18} {finding.text}", flush=True)
