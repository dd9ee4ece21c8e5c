"""docs/settings.md has every setting as the code declares it, and its examples are valid."""

import pytest

from lanekeeper.contract.problems import SettingsError
from tests.support.settings import load, wrong
from tests.support.settings_page import LANE, PAGE, Entry, entries, page

ENTRIES = entries()
GIVEN = {
    "LANEKEEPER_SPEAKERS": "guest",
    "LANEKEEPER_WEBHOOKS__SECRETS": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
}


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]


def test_docs_settings_is_generated_from_the_declarations() -> None:
    assert page() == PAGE.read_text(), "run: python -m tests.support.settings_page"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variable)
def test_each_setting_has_a_text_and_a_valid_example(entry: Entry) -> None:
    assert entry.text, "what it does: the docstring below its field"
    assert entry.example not in ("", "none")
    name = entry.variable.replace(LANE, "BATCH").replace("<NAME>", "OTHER")
    others = {
        "LANEKEEPER_PROVIDERS__OTHER__BASE_URL": "https://other.example.com",
        "LANEKEEPER_PRICES__MODELS": '{"anthropic.claude-sonnet-5-5": {"input": 1, "output": 5}}',
    }
    tenant = {
        "LANEKEEPER_WEBHOOKS__TENANTS__OTHER__ALLOW_HOSTS": "hooks.example.com",
        "LANEKEEPER_WEBHOOKS__TENANTS__OTHER__SECRETS": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
    }
    schedule = {
        "LANEKEEPER_SCHEDULES__OTHER__CRON": "0 7 * * *",
        "LANEKEEPER_SCHEDULES__OTHER__KEY": "batch.reports.nightly",
        "LANEKEEPER_SCHEDULES__OTHER__BODY": '{"prompt": "x"}',
        "LANEKEEPER_HANDLERS__CHUNK__RUN": "documents.parts:chunk",
    }
    pipeline = {"LANEKEEPER_PIPELINES__OTHER__STEPS": '[{"name": "all", "prompt": "Sum up"}]'}
    if name.endswith("_FILE"):
        told = wrong(env={name: entry.example})
        assert "allowed is a file that is there" in told, "the example's file is not here, and that alone is wrong"
        return
    try:
        load(
            env={
                **GIVEN,
                **(others if "PROVIDERS__OTHER" in name else {}),
                **(schedule if "SCHEDULES__OTHER" in name else {}),
                **(pipeline if "PIPELINES__OTHER" in name else {}),
                **(tenant if "TENANTS__OTHER" in name else {}),
                name: entry.example,
            }
        )
    except SettingsError as error:  # a provider of another kind needs further settings, or has none of this name
        assert "a provider of kind" in str(error) or "HANDLERS__OTHER__RUN: is not set" in str(error)  # noqa: PT017


def test_the_examples_in_the_pages_text_are_valid() -> None:
    text = PAGE.read_text()
    (toml,) = (each.partition("```")[0] for each in text.split("```toml\n")[1:])
    assert load(toml).namespace == "staging"
    for block in text.split("```sh\n")[1:]:
        lines = [line.partition("=") for line in block.partition("```")[0].splitlines() if line.startswith("LANE")]
        load(env={name: value for name, _, value in lines if not name.endswith("_FILE")})
