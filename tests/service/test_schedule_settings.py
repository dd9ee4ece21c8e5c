"""Schedules in the settings, and which of them are refused."""

import pytest

from tests.support.settings import wrong

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_wrong_schedules_are_refused_all_at_once_by_name() -> None:
    def one(name: str, **given: str) -> dict[str, str]:
        good = {"CRON": "0 7 * * *", "KEY": "batch.reports.x", "BODY": '{"prompt": "x"}', **given}
        return {f"LANEKEEPER_SCHEDULES__{name}__{field}": value for field, value in good.items()}

    told = wrong(
        env={
            **one("NEVER", CRON="0 0 30 2 *"),
            **one("ODD", CRON="soon"),
            **one("ZONE", TIMEZONE="Europe/Atlantis"),
        }
    )
    assert "LANEKEEPER_SCHEDULES__NEVER__CRON: found '0 0 30 2 *', allowed is a cron expression that fires" in told
    assert "LANEKEEPER_SCHEDULES__ODD__CRON: found 'soon', allowed is a cron expression" in told
    assert "LANEKEEPER_SCHEDULES__ZONE__TIMEZONE: found 'Europe/Atlantis', allowed is a time zone" in told

    told = wrong(
        "[schedules.Big]\ncron = '0 7 * * *'\nkey = 'batch.a.b'\nbody = {prompt = 'x'}",
        env={
            **one("LANE", KEY="urgent.reports.x"),
            **one("WORD", KEY="batch.reports"),
            **one("LONG", KEY="batch.reports." + "x" * 242),
            **one("BODY", BODY='{"promt": "x"}'),
            **one("HEADER", HEADERS='{"x-lane-deadlin-ms": 5}'),
            **one("TYPE", TYPE="chunk"),
            **one("HOOK", HEADERS='{"x-lane-webhook": "https://hooks.example.com/"}'),
            **one("BIG_NUMBER", HEADERS='{"x-mine": 99999999999999999999}'),
            **one("MANY_BYTES", HEADERS=f'{{"x-mine": "{70_000 * "x"}"}}'),
            "LANEKEEPER_SCHEDULES__BARE__KEY": "batch.reports.x",
        },
    )

    lanes = "allowed is LANE.APP.TASK with a lane of critical, normal, batch"
    assert f"LANEKEEPER_SCHEDULES__LANE__KEY: found 'urgent.reports.x', {lanes}" in told
    assert f"LANEKEEPER_SCHEDULES__WORD__KEY: found 'batch.reports', {lanes}" in told
    assert "LANEKEEPER_SCHEDULES__LONG__KEY: found 'batch.reports.xxx" in told
    assert "LANEKEEPER_SCHEDULES__BODY__BODY: " in told
    assert "x-lane-deadlin-ms" in told
    assert "LANEKEEPER_SCHEDULES__TYPE__BODY, LANEKEEPER_SCHEDULES__TYPE__TYPE: " in told
    assert "LANEKEEPER_SCHEDULES__HOOK__HEADERS: x-lane-webhook: webhooks are off" in told
    for name in ("BIG_NUMBER", "MANY_BYTES"):
        assert f"LANEKEEPER_SCHEDULES__{name}__HEADERS: cannot be sent" in told
    assert "LANEKEEPER_SCHEDULES__BARE__CRON: is not set" in told
    assert "schedules.Big.cron in given.toml" in told
    assert "'Big' is no name" in told
