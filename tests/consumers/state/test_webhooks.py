"""The logs of webhooks, for every engine."""

import pytest

from consumers.state import base
from consumers.state.base import Identity
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened, in_ms

ONE, OTHER = Identity("crm:1", "r-1"), Identity("", "r-1")


async def test_the_last_log_of_each_webhook_is_found_by_every_process(opened: Opened) -> None:
    here, there = await opened(), await opened()
    for at, row in enumerate((b'{"attempts": 1}', b'{"attempts": 2}')):
        await here.note_webhook(ONE, row, until_ms=in_ms(60_000 + at))
    await there.note_webhook(OTHER, b"{}", until_ms=in_ms(90_000))

    assert await there.webhook(ONE) == b'{"attempts": 2}'
    assert await here.webhooks(most=9) == [(OTHER, b"{}"), (ONE, b'{"attempts": 2}')]
    assert await here.webhooks(most=1) == [(OTHER, b"{}")]
    assert await here.webhook(Identity("crm", "r-1")) is None


async def test_a_log_is_kept_until_its_end(store: Store) -> None:
    await store.note_webhook(ONE, b"{}", until_ms=in_ms(-1))
    assert await store.webhook(ONE) is None
    assert await store.webhooks(most=9) == []
    await store.sweep()


async def test_above_the_limit_those_that_end_first_are_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WEBHOOKS_KEPT", 2)
    until_ms = in_ms(60_000)
    for at in range(5):
        await store.note_webhook(Identity("t", str(at)), b"{}", until_ms=until_ms + at)
    await store.sweep()
    assert [identity.id for identity, _ in await store.webhooks(most=9)] == ["4", "3"]


async def test_one_tenant_s_logs_push_out_none_of_a_tenant_that_has_fewer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "WEBHOOKS_KEPT", 6)
    until_ms = in_ms(60_000)
    for at, tenant in enumerate(("few", "few", "", *["many"] * 40)):
        await store.note_webhook(Identity(tenant, str(at)), b"{}", until_ms=until_ms + at)
        await store.sweep()
    found = [(identity.tenant, identity.id) for identity, _ in await store.webhooks(most=99)]
    assert found == [("many", "42"), ("many", "41"), ("many", "40"), ("", "2"), ("few", "1"), ("few", "0")]
