"""Ids, tenants and texts that contain SQL, Redis commands and the like are stored as plain values (threat T20)."""

import pytest

from consumers.state.base import Ended, Granted, Identity, Store
from tests.support.completions import answered, fingerprint

LONG = "x" * 10_000
HOSTILE = (
    "'; DROP TABLE requests; --",
    '" OR ""="',
    "a\0b",
    "\r\nFLUSHALL\r\n",
    "*1\r\n$8\r\nFLUSHALL\r\n",
    "{lane}:x",
    "a:b",
    "*",
    "?",
    "[a-z]*",
    "../../etc/passwd",
    "%s%n",
    "ü\U0001f600",
    "\u202e",
    LONG,
    LONG + "'",
    "",
)


@pytest.mark.slow
async def test_each_hostile_id_is_a_separate_identity_and_returns_its_own_result(store: Store) -> None:
    identities = [Identity(tenant, id) for tenant in HOSTILE for id in HOSTILE]
    for number, identity in enumerate(identities):
        found = await store.claim(identity, fingerprint(f"body {number}"))
        assert isinstance(found, Granted), identity
        text = f"{number} {identity.id}"
        assert await store.complete(identity, fingerprint(f"body {number}"), answered(text), token=found.token)
    for number, identity in enumerate(identities):
        kept = await store.find(identity)
        assert kept is not None
        assert kept.completion == answered(f"{number} {identity.id}"), identity
        assert isinstance(await store.claim(identity, fingerprint(f"body {number}", redelivered=True)), Ended)


@pytest.mark.parametrize("one", [("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "")])
async def test_a_tenant_and_an_id_cannot_be_taken_for_another_tenant_and_id(store: Store, one: tuple[str, str]) -> None:
    others = [("a", "b:c"), ("a:b", "c"), ("", "a:b:c"), ("a:b:c", "")]
    found = await store.claim(Identity(*one), fingerprint())
    assert isinstance(found, Granted)
    await store.complete(Identity(*one), fingerprint(), answered("mine"), token=found.token)
    assert [pair for pair in others if await store.find(Identity(*pair)) is not None] == [one]
