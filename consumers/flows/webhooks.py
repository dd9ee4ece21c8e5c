"""Posts the final outcome of a request to the URL that its requester named (`x-lane-webhook`), signed as Standard
Webhooks says.

When a request ends, `settle.py` publishes the outcome to `lane.webhooks` (`Webhooks`). Every worker consumes this queue
(`posting.py`), so that a slow endpoint holds no lane. A post that failed goes round the delay exchanges and comes back;
after `give_up_s` it becomes a dead letter. An outcome is posted at least once, under the same `webhook-id`.

The requester chooses the address that a worker calls, and could choose an internal one. So only allowed hosts are
called, redirects are not followed, every address that a name resolves to is checked, and the checked one is dialled.

It could also choose another tenant's receiver, and an id of its. So each tenant has secrets of its own: whoever knows
only the other tenant's takes no post of this one for genuine.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, Self

import structlog
from yarl import URL

from consumers.addresses import is_private
from consumers.job import Job
from consumers.state.base import Completion, Identity
from consumers.state.store import Store
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import (
    PROBLEMS,
    MessageTooLarge,
    RequestProblem,
    answer_too_large,
    invalid_request,
)

LONGEST_PAUSE_S: Final = 6 * 3600.0
"""Between two posts that failed."""
LISTED: Final = 100
PRIVATE: Final = "its host has a private address"
STATES: Final = ("delivered", "retrying", "gone", "undelivered")
UNDELIVERED: Final = "webhook_undelivered"
_ENTRY = re.compile(r"(?P<host>\*|(\*\.)?[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?", re.IGNORECASE)
log = structlog.get_logger()


def is_host(entry: str) -> bool:
    """Whether this can be one of `WebhookSpec.hosts`."""
    return _ENTRY.fullmatch(entry) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """`hosts`: `example.com`, `*.example.com` (all below it) or `*` (any), with a port if it is not the scheme's own.
    `secrets`: each signs."""

    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSpec:
    """`hooks`: of requests without a tenant; `tenants`: of each tenant that has webhooks. Without any host, they are
    off. `private`: whether hosts may have private addresses. `http`: whether URLs may begin with `http:`."""

    hooks: Hooks = Hooks()
    tenants: Mapping[str, Hooks] = field(default_factory=dict)
    private: bool = False
    http: bool = False
    timeout_s: float = 15
    first_pause_s: float = 5
    """Before the second post; every further pause is twice as long as the one before, up to `LONGEST_PAUSE_S`."""
    give_up_s: float = 3 * 86_400

    @property
    def is_on(self) -> bool:
        return bool(self.hooks.hosts or self.tenants)

    def of(self, tenant: str) -> Hooks:
        return self.tenants.get(tenant, Hooks()) if tenant else self.hooks

    def refusal(self, url: str, *, tenant: str) -> str | None:
        """Why nothing may be posted to this URL, as far as that is known without resolving its host."""
        if not (hosts := self.of(tenant).hosts):
            if tenant:
                return (
                    f"tenant {tenant[:80]!r} has no webhooks: it needs a table [webhooks.tenants.NAME] in the settings"
                )
            return "webhooks are off until hosts are allowed (LANEKEEPER_WEBHOOKS__ALLOW_HOSTS)"
        try:
            parts = read_url(url)
            host, port = (parts.raw_host or "").lower().removesuffix("."), parts.port
        except ValueError:
            return "this is no URL"
        if parts.scheme != "https" and not (self.http and parts.scheme == "http"):
            return "allowed is https"
        if not host or parts.raw_user is not None or parts.raw_password is not None or parts.raw_fragment:
            return "it may have no user, no password and no fragment, and it needs a host"
        if not self.private and is_private(host):
            return PRIVATE
        if not any(_fits(entry, host, port, is_default=parts.is_default_port()) for entry in hosts):
            where = "allow_hosts of its tenant" if tenant else "LANEKEEPER_WEBHOOKS__ALLOW_HOSTS"
            return f"its host is not allowed ({where})"
        return None


def read_url(text: str) -> URL:
    """Raises ValueError if it is none."""
    try:
        return URL(text)
    except IndexError:  # yarl, of `https://[]@`
        raise ValueError("this is no URL") from None


def _fits(entry: str, host: str, port: int | None, *, is_default: bool) -> bool:
    if (found := _ENTRY.fullmatch(entry.lower())) is None:
        return False
    allowed = found["host"].strip("[]")
    fits_port = is_default if found["port"] is None else int(found["port"]) == port
    return fits_port and (host.endswith(allowed[1:]) if allowed.startswith("*") else host == allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What a message of `lane.webhooks` says beside its body, which is posted as it is. Times are ms since 1970."""

    url: str
    id: str
    status: str
    tenant: str
    routing_key: str
    """Of the request."""
    content_type: str
    first_ms: int | None = None
    """When it was first delivered; None: it was not yet."""
    due_ms: int = 0
    attempts: int = 0
    errors: tuple[str, ...] = ()
    """How the last attempts failed, the newest first."""

    @classmethod
    def of(cls, message: Message, *, now_ms: int) -> Self:
        """Raises KeyError, TypeError, ValueError."""
        headers = message.headers
        texts = (n.WEBHOOK, n.REQUEST_ID, n.STATUS, n.ROUTING_KEY)
        if not all(isinstance(headers[name], str) for name in texts):
            raise TypeError
        first_ms = headers.get(n.FIRST_SEEN_MS)
        return cls(
            url=headers[n.WEBHOOK],
            id=headers[n.REQUEST_ID],
            status=headers[n.STATUS],
            tenant=str(headers.get(n.TENANT, "")),
            routing_key=headers[n.ROUTING_KEY],
            content_type=message.content_type or "application/json",
            first_ms=now_ms if first_ms is None else int(first_ms),
            due_ms=now_ms if first_ms is None else int(headers[n.DUE_MS]),
            attempts=0 if first_ms is None else int(headers[n.ATTEMPT]),
            errors=tuple(map(str, headers.get(n.ERRORS, ()))),
        )

    @property
    def lane(self) -> str:
        return self.routing_key.partition(".")[0]

    @property
    def endpoint(self) -> str:
        """Without path and query, which may be secret. Raises ValueError."""
        url = read_url(self.url).origin()
        host = url.host or ""
        return str(url.with_host(host[:-1]) if host.endswith(".") else url)

    def headers(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            n.WEBHOOK: self.url, n.REQUEST_ID: self.id, n.STATUS: self.status, n.ROUTING_KEY: self.routing_key,
        }  # fmt: skip
        if self.tenant:
            found[n.TENANT] = self.tenant
        if self.first_ms is not None:
            tries = {n.FIRST_SEEN_MS: self.first_ms, n.DUE_MS: self.due_ms, n.ATTEMPT: self.attempts}
            found |= {**tries, n.ERRORS: list(self.errors)}
        return found

    def message(self, body: bytes) -> Message:
        return Message(body=body, headers=self.headers(), content_type=self.content_type, message_id=uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What the store keeps of a request's webhook, for people."""

    url: str
    routing_key: str
    endpoint: str
    state: str
    """`retrying`, `delivered`, `gone` (the endpoint answered 410) or `undelivered`."""
    attempts: int
    errors: tuple[str, ...]
    at: str
    next_at: str | None


class PostFailed(Exception):
    """An attempt failed; the text says how, without anything that may be secret."""


class PostForbidden(PostFailed):
    """It would fail again."""


@dataclass(slots=True, eq=False)
class Webhooks:
    """Publishes the outcomes of requests that are to be posted."""

    publisher: Publisher
    _: KW_ONLY
    spec: WebhookSpec
    names: Names
    store: Store

    def refusal(self, job: Job) -> RequestProblem | None:
        url = job.message.headers.get(n.WEBHOOK)
        if not isinstance(url, str) or (why := self.spec.refusal(url, tenant=job.identity.tenant)) is None:
            return None
        return RequestProblem("forbidden_webhook", f"header {n.WEBHOOK}: {why}")

    async def publish(self, job: Job, completion: Completion) -> None:
        """If the request names a webhook, publish its outcome to be posted there. A group's requests have one webhook
        together, which gets the group's end (`GroupEnds`). Raises BrokerError.

        The error `idempotency_conflict` is not posted: under its id the outcome of the request is posted that owns the
        id."""
        url = job.message.headers.get(n.WEBHOOK)
        if not isinstance(url, str) or job.group is not None or completion.code == "idempotency_conflict":
            return
        if self.spec.refusal(url, tenant=job.identity.tenant) is not None:
            return
        if completion.code and not PROBLEMS[completion.code].answered:
            return
        try:
            await self.send(completion, url=url, identity=job.identity, routing_key=job.routing_key)
        except MessageTooLarge as error:  # stored while the broker accepted larger messages
            problem = answer_too_large(error.size, error.limit).document(request=job.id, attempts=job.attempts)
            cut = replace(completion, status="error", code="answer_too_large", body=problem)
            await self.send(cut, url=url, identity=job.identity, routing_key=job.routing_key)

    async def carry_out(self, command: str, body: Mapping[str, object]) -> dict[str, Any]:
        """The answer to a control message of an operator: the logs of webhooks, or of one; to `redeliver`, that of the
        webhook whose outcome is posted again. Raises RequestProblem, StoreUnavailable, BrokerError."""
        id, tenant = body.get(command), body.get("tenant") or ""
        if id is None and command == n.WEBHOOKS_KEY:
            return {"webhooks": [_named(*each) for each in await self.store.webhooks(most=LISTED)]}
        if not isinstance(id, str) or not isinstance(tenant, str):
            raise invalid_request(f'body: allowed is {{"{command}": "<message_id>", "tenant": "…"}}')
        identity = Identity(tenant, id)
        if (row := await self.store.webhook(identity)) is None:
            raise invalid_request(f"{command}: no webhook of request {id[:80]!r} of tenant {tenant[:80]!r} is known")
        if command == n.REDELIVER_KEY:
            found, kept = await self.store.find(identity), Log(**json.loads(row))
            if found is None or found.completion is None:
                raise invalid_request(
                    f"{command}: the outcome of {id[:80]!r} is kept no longer; if it is a dead letter, replay that"
                )
            await self.send(found.completion, url=kept.url, identity=identity, routing_key=kept.routing_key)
        return {"webhooks": [_named(identity, row)]}

    async def describe(self, identity: Identity) -> dict[str, Any] | None:
        """How posting this request's outcome went, if it has a webhook. Raises StoreUnavailable."""
        row = await self.store.webhook(identity)
        return None if row is None else log_entry(row)

    async def send(self, completion: Completion, *, url: str, identity: Identity, routing_key: str) -> None:
        """Raises BrokerError."""
        id = identity.id
        if not is_request_id(id):  # the request is refused for it, and it may be no header of HTTP
            id = hashlib.sha256(id.encode(errors="backslashreplace")).hexdigest()
        post = Post(
            url=url,
            id=id,
            status=completion.status,
            tenant=identity.tenant,
            routing_key=routing_key,
            content_type=f"application/{'json' if completion.status == 'ok' else 'problem+json'}",
        )
        await self.publisher.publish_surely(
            post.message(completion.body),
            exchange=self.names.webhooks,
            routing_key=self.names.webhook_key(post.lane),
        )


def redelivered(letter: Message) -> Message:
    """The message that posts the outcome of this dead letter again. Raises RequestProblem if it is none."""
    try:
        post = Post.of(letter, now_ms=0)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise invalid_request("this dead letter is not complete: its outcome cannot be posted again") from None
    return replace(post, first_ms=None).message(letter.body)


def log_entry(row: bytes) -> dict[str, Any]:
    """What a stored `Log` says, without the URL, which may be secret."""
    return {name: value for name, value in json.loads(row).items() if name not in ("url", "routing_key")}


def _named(identity: Identity, row: bytes) -> dict[str, Any]:
    return {"id": identity.id, "tenant": identity.tenant, **log_entry(row)}
