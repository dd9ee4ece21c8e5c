"""The store in Redis, for workers on several machines. Each method runs one script, and so takes one round trip.

The promises of `Store` hold as long as Redis keeps the writes that it has acknowledged. With `appendonly yes` and
`appendfsync always` it keeps them through a crash; with `everysec` it may lose the last second. If Redis comes back
empty, claims and results are lost: a repeated id runs again, but no request is lost. Redis Cluster is not supported,
because a renewal is one script over the keys of all running requests.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self
from urllib.parse import quote

from consumers.state import base
from consumers.state.base import Completion, Fingerprint, Held, Identity, StoreUnavailable
from consumers.state.redis import request_scripts, share_scripts
from consumers.state.redis.client import Argument, RedisClient
from consumers.state.redis.following import Followed
from consumers.state.spec import DEFAULT, StoreSpec
from lanekeeper.telemetry import logs, signals

log = logs.logger()


class RedisStore(Followed):
    """Implements `FollowedStore`. `spec.max_bytes` is ignored: the size of the data is limited by Redis's setting
    `maxmemory`, and keys expire by themselves."""

    def __init__(self, url: str, *, namespace: str, spec: StoreSpec = DEFAULT) -> None:
        super().__init__(RedisClient(url), namespace=namespace, spec=spec)
        self._lease_ms = round(spec.lease_s * 1000)
        self._cancelled_ms = round(spec.cancelled_s * 1000)
        self._spec = spec
        self._warned = False

    @property
    def trouble(self) -> str | None:
        return self._client.trouble

    async def __aenter__(self) -> Self:
        with suppress(StoreUnavailable):
            await self.probe()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def probe(self) -> None:
        await self._client.write(f"{self._namespace}:probe", "1", for_s=60)
        if not self._warned:
            self._warned = True
            for reason in await self._client.risks():
                log.warning(signals.STORE_VOLATILE, store=self._client.address, reason=reason)

    async def claim(
        self, identity: Identity, fingerprint: Fingerprint
    ) -> base.Granted | base.Running | base.Ended | base.Conflict:
        times = (self._lease_ms, self._keep_ms, self._cancelled_ms)
        match await self._client.run(
            request_scripts.CLAIM, self._keys(identity), *_of_fingerprint(fingerprint), *times
        ):
            case [b"granted", token, deaths, followed]:
                return base.Granted(token=token, deaths=deaths, followed=followed == 1)
            case [b"running", for_ms]:
                return base.Running(for_ms=for_ms)
            case [b"ended", is_same_message, ending]:
                return base.Ended(completion=_completion(ending), is_same_message=is_same_message == 1)
            case _:
                return base.Conflict()

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, base.Stop]:
        if not held:
            return {}
        keys = [self._request(claim.identity) for claim in held]
        tokens = [claim.token for claim in held]
        stops = await self._client.run(request_scripts.RENEW, keys, self._lease_ms, self._keep_ms, *tokens)
        return {claim: base.Stop(stop.decode()) for claim, stop in zip(held, stops, strict=True) if stop}

    async def release(self, held: Held, *, attempts: int = 0, due_ms: int | None = None) -> None:
        values = (held.token, attempts, "" if due_ms is None else due_ms, self._keep_ms, self._cancelled_ms)
        await self._client.run(request_scripts.RELEASE, [self._request(held.identity)], *values)

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        return bool(await self._client.run(request_scripts.DEFER, [self._request(identity)], due_ms, keep_until_ms))

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        held = "" if token is None else token
        values = (self._keep_ms, *_of_fingerprint(fingerprint), held, *_of_completion(completion))
        # without a claim the script may restart the entries
        keys = self._keys(identity) if token is None else [self._request(identity)]
        match await self._client.run(request_scripts.COMPLETE, keys, *values):
            case [b"given"]:
                return completion
            case [b"held", ending]:
                return _completion(ending)
            case _:
                return None

    async def note(self, identity: Identity, completion: Completion) -> None:
        values = (self._keep_ms, *_of_completion(completion))
        await self._client.run(request_scripts.NOTE, [self._request(identity)], *values)

    async def cancel(self, identity: Identity, completion: Completion) -> base.Cancelling:
        unseen = (identity.id, self._request(Identity(identity.tenant, "")), self._spec.unseen_per_tenant)
        values = (self._cancelled_ms, *_of_completion(completion), *unseen)
        keys = [self._request(identity), self._of_tenant("unseen", identity.tenant)]
        return base.Cancelling((await self._client.run(request_scripts.CANCEL, keys, *values)).decode())

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> base.WaitingLimit:
        member = f"{identity.id} {fingerprint.mark.hex()}"
        tenant, redelivered = quote(identity.tenant, safe=""), int(fingerprint.redelivered)
        message = (tenant, member, fingerprint.nonce.hex(), redelivered, weight, until_ms)
        keys = [self._of_tenant("waiting", identity.tenant), f"{self._namespace}:waiting"]
        bounds = (self._spec.waiting_per_tenant, self._spec.waiting_in_all)
        return base.WaitingLimit((await self._client.run(share_scripts.RESERVE, keys, *message, *bounds)).decode())

    async def find(self, identity: Identity) -> base.Found | None:
        match await self._client.run(request_scripts.FIND, [self._request(identity)]):
            case [b"ended", attempts, ending]:
                return base.Found(completion=_completion(ending), running=False, attempts=int(attempts))
            case [state, attempts, due]:
                due_ms = int(due) if due else None
                return base.Found(completion=None, running=state == b"running", attempts=int(attempts), due_ms=due_ms)
            case _:
                return None

    async def sweep(self) -> int:
        """Does nothing: keys expire by themselves."""
        return 0

    async def take(self, name: str, amount: float, *, limit: float, period_s: int) -> base.Taken:
        keys = [self._allowance(name, period_s)]
        granted, used, resets_in_ms = await self._client.run(share_scripts.TAKE, keys, amount, limit, period_s)
        return base.Taken(granted=granted == 1, used=float(used), resets_in_s=resets_in_ms / 1000)

    async def give_back(self, name: str, amount: float, *, period_s: int) -> None:
        await self._client.run(share_scripts.CORRECT, [self._allowance(name, period_s)], amount, period_s)

    async def hold(self, name: str, owner: str, *, for_s: float) -> int | None:
        token = await self._client.run(
            share_scripts.HOLD, [f"{self._namespace}:lease:{name}"], owner, round(for_s * 1000)
        )
        return None if token is None else int(token)

    async def let_go(self, name: str, owner: str) -> None:
        await self._client.run(share_scripts.LET_GO, [f"{self._namespace}:lease:{name}"], owner)

    def _of_tenant(self, kind: str, tenant: str) -> str:
        return f"{self._namespace}:{kind}:{quote(tenant, safe='')}"

    def _allowance(self, name: str, period_s: int) -> str:
        return f"{self._namespace}:allowance:{period_s}:{name}"


def _of_fingerprint(fingerprint: Fingerprint) -> tuple[Argument, ...]:
    dead_at: Argument = "" if fingerprint.dead_at_ms is None else fingerprint.dead_at_ms
    return (fingerprint.body_hash, fingerprint.mark, int(fingerprint.redelivered), dead_at, fingerprint.nonce)


def _of_completion(completion: Completion) -> tuple[Argument, ...]:
    headers = json.dumps(dict(completion.headers), ensure_ascii=False)
    return (completion.status, completion.code, headers, completion.ended_ms, completion.body)


def _completion(ending: Sequence[Any]) -> Completion:
    status, code, headers, ended_ms, body, mark = ending
    return Completion(
        status="ok" if status == b"ok" else "error",
        code=code.decode(),
        body=body,
        headers=json.loads(headers),
        ended_ms=int(ended_ms),
        mark=mark or None,
    )
