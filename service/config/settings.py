"""All settings, and the frozen specs that the lower packages get of them; none of those sees `Settings`."""

import contextlib
import fnmatch
import os
import re
import ssl
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import quote, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from consumers.failures import RetryPolicy
from consumers.flows.handlers import HandlerSpec
from consumers.flows.pipelines import PipelineSpec
from consumers.flows.schedules import ScheduleSpec
from consumers.housekeeping import DeadSpec
from consumers.job import ATTEMPT_WITHIN_S
from consumers.limits.base import LEAST_LIMITS, AccountCaps, BatchLimits, BudgetSpec, shares_of
from consumers.prices import BATCH_SHARE, Prices
from consumers.providers.routes import DEFAULT_VERSION, HeaderRules, ProviderModels, RoutesSpec
from consumers.rate_limit import INVALID_PER_HOUR
from consumers.replies import ReplyRule
from consumers.spending import DAY, EVERY_TENANT, MONTH, WEEK, Cap, Caps, CapsSpec
from consumers.state.base import SEEN_LATE_S, PauseKind, StoreSpec
from lanekeeper.bodies import IN_ALL_BYTES, KEEP_S, MOST_BYTES, OVER_BYTES, BodyStore
from lanekeeper.contract.identity import is_request_id, urls_of
from lanekeeper.contract.names import ANTHROPIC_MESSAGES, OPENAI_DIALECTS, Names
from service.config import value_types as types
from service.config.flows import HandlerSettings, PipelineSettings
from service.config.hooks import WebhooksSettings
from service.config.schedules import ScheduleSettings
from service.config.value_types import Disagreement, Number, Section, clash, matching, words, wrong
from topology.broker.memory import HELD_BYTES
from topology.codec.bodies import user_hash
from topology.codec.bounds import ANSWER_BYTES, VALUES
from topology.lanes import DEFAULT_LANES, GIB, MIB, NORMAL, BatchSpec, LaneSpec, nearest

YEAR_S = 365 * 86_400
"""The highest value, in seconds, that most settings of a duration may have: a year."""
MOST_RANK = 1_000_000


class BatchesSettings(Section):
    """How a lane's requests are gathered for the batches of its providers, which cost half (docs/batches.md)."""

    enabled: bool = False
    """Whether requests that can wait are answered in batches, where the provider has them."""
    count: Number[int] = Field(default=BatchSpec().count, ge=1, le=10_000)
    """A batch is complete with so many requests."""
    bytes: Number[int] = Field(default=BatchSpec().bytes, ge=MIB, le=64 * MIB)
    """A batch is complete with so many bytes of requests. A request of more than a thirty-second part runs live."""
    window_s: Number[float] = Field(default=BatchSpec().window_s, gt=0, le=600)
    """A batch is complete when its first request has waited for so long."""
    least_s: Number[float] = Field(default=BatchSpec().least_s, gt=0, le=YEAR_S)
    """A request whose deadline is nearer than this runs live."""
    promote_s: Number[float] = Field(default=BatchSpec().promote_s, gt=0, le=YEAR_S)
    """So long before its deadline, a request whose batch has not ended runs live."""
    first_poll_s: Number[float] = Field(default=BatchSpec().first_poll_s, ge=0.1, le=3600)
    """A batch is looked at first after this time; each further pause is twice as long, up to ten minutes."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.promote_s >= self.least_s:
            text = (
                f"promote_s ({self.promote_s:g}) is not below least_s ({self.least_s:g}): no batch would be waited for"
            )
            yield clash(text, "promote_s", "least_s")


class LaneSettings(Section):
    """The settings of one lane. The defaults are in `topology/lanes.py`; a lane of one's own has those of the default
    lane with the nearest rank."""

    enabled: bool = True
    """`false`: there is no such lane. Example: false"""
    rank: Number[int] = Field(ge=1, le=MOST_RANK)
    """The order of urgency: the lowest is served first. No two lanes may share one. With a new name, it
    declares a lane. Example: 5"""
    slots: Number[int] = Field(ge=1, le=10_000)
    """How many requests of the lane's intake one process works on at the same time. If it is set, `slots_max` is the
    same by default."""
    slots_min: Number[int] | None = Field(default=None, ge=0, le=10_000)
    """How many idle slots the lane keeps for itself and never lends. None: one eighth of `slots`, and at least one.
    Example: 4"""
    slots_max: Number[int] | None = Field(default=None, ge=1, le=10_000)
    """The most slots that the lane may have, with those that are lent and added. None: eight times the default of
    `slots`, or `slots` if that is set. Example: 64"""
    target_wait_s: Number[float] = Field(gt=0, le=YEAR_S)
    """If requests wait longer than this for a slot, the lane gets more slots."""
    call_timeout_s: Number[float] = Field(gt=0, le=ATTEMPT_WITHIN_S)
    """The time limit of one attempt; streamed, of the wait for the first token, and of every pause after it. A call of
    the gateway's `/v1/messages` may take all of its deadline instead."""
    deadline_s: Number[float] = Field(gt=0, le=YEAR_S)
    """The deadline of a request that names none: from its publishing or due time to its final answer. A stream that
    flows is not cut by it."""
    deadline_max_s: Number[float] = Field(gt=0, le=YEAR_S)
    """The longest deadline that a request may name."""
    max_attempts: Number[int] = Field(ge=1, le=100)
    """How often one request may be tried, including the first attempt."""
    model: types.ModelName
    """The model for requests that name none."""
    max_tokens: Number[int] = Field(ge=1, le=1_000_000)
    """`max_tokens` of requests that do not set it."""
    models: types.ModelWords | None = None
    """The models that requests of the lane may name. None: every model. Example: claude-sonnet-5-5,claude-haiku-5-5"""
    anthropic_version: types.ApiVersion | None = None
    """The version of Anthropic's API for requests of the lane without a header `anthropic-version`. None: the
    provider's. Example: 2026-10-21"""
    park_invalid: bool = True
    """Whether a request that is wrong, or that the provider refuses, is also kept in the queue `lane.dead`. Its
    requester gets the error in any case. Example: false"""
    providers: types.ProviderNames | None = None
    """The providers that the lane calls, in this order. None: all, the one of ANTHROPIC_API_KEY first, then by name.
    Example: anthropic"""
    max_length: Number[int] = Field(ge=1, le=1_000_000_000)
    """How many messages the lane's intake holds at most. When it is full, publishers get a nack in place of a
    confirm."""
    max_length_bytes: Number[int] = Field(ge=MIB, le=1024 * GIB)  # at least the largest request
    """The maximum size of all message bodies in the lane's intake together."""
    gather_embeddings: Number[int] = Field(ge=1, le=1000)
    """How many requests for embeddings with the same settings become one call of the provider at most. 1: none are
    gathered. Each holds a slot of the lane: set `slots` to at least this. Example: 32"""
    gather_window_s: Number[float] = Field(gt=0, le=5)
    """For how long the first of them waits for the others."""
    side_queues: Number[int] = Field(ge=0, le=32)
    """The number of queues to which the backlog of a tenant is moved. 0: nothing is moved. After a change run
    `lanekeeper topology apply`."""
    batches: BatchesSettings = BatchesSettings()

    def disagreements(self) -> Iterator[Disagreement]:
        if self.models is not None and self.model not in self.models:
            text = f"models leaves out the lane's own model, {self.model}; add it, or set another model"
            yield clash(text, "models", "model")
        if self.slots_min is not None and self.slots_min > self.slots:
            text = f"slots_min ({self.slots_min}) is above slots ({self.slots}); lower it, or set more slots"
            yield clash(text, "slots_min", "slots")
        if self.slots_max is not None and self.slots_max < self.slots:
            text = f"slots_max ({self.slots_max}) is below slots ({self.slots}); raise it, or set fewer slots"
            yield clash(text, "slots_max", "slots")
        if self.batches.enabled and self.batches.least_s >= self.deadline_max_s:
            yield Disagreement(
                f"batches.least_s ({self.batches.least_s:g}) is not below deadline_max_s ({self.deadline_max_s:g}): no "
                "request would be put into a batch; lower it, raise the other, or set batches.enabled = false",
                at=(("batches", "least_s"), ("deadline_max_s",), ("batches", "enabled")),
            )

    def spec(self, name: str) -> LaneSpec:
        values = self.model_dump(exclude={"enabled", "providers", "models", "batches"})
        return LaneSpec(
            name=name,
            **values,
            models=None if self.models is None else frozenset(self.models),
            batches=BatchSpec(**self.batches.model_dump()),
        )


def _defaults_of(spec: LaneSpec) -> dict[str, Any]:
    values = {name: getattr(spec, name) for name in LaneSettings.model_fields if hasattr(spec, name)}
    return {**values, "batches": asdict(spec.batches)}


_DEFAULT_LANES = {spec.name: _defaults_of(spec) for spec in DEFAULT_LANES}


def _with_defaults(given: Any) -> Any:
    """Add the default lanes, and to each lane the values that are not given."""
    if not isinstance(given, Mapping):
        return given
    return {name: _lane(name, given.get(name, {})) for name in {**_DEFAULT_LANES, **given}}


def _lane(name: str, given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    defaults = _DEFAULT_LANES.get(name)
    if defaults is None:
        try:
            like = nearest(DEFAULT_LANES, int(given["rank"]))
        except (KeyError, TypeError, ValueError):
            like = NORMAL
        like = replace(like, batches=replace(like.batches, enabled=False))
        defaults = {value: default for value, default in _defaults_of(like).items() if value != "rank"}
    # a lane whose slots are set gets no more of them, unless `slots_max` is set as well
    most = {"slots_max": given["slots"]} if "slots" in given else {}
    batches = given.get("batches", {})
    if isinstance(batches, Mapping):
        merged = {**defaults["batches"], **batches}
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a wrong value is told with the others
            # a lane whose deadlines leave no time for a batch has none, unless they are asked for
            if float(given["deadline_max_s"]) <= float(merged["least_s"]):
                merged = {**merged, "enabled": False, **batches}
        batches = merged
    return {**defaults, **most, **given, "batches": batches}


class TlsSettings(Section):
    """The TLS settings for connections to the broker (`amqps://`), to its management API (https) and to Redis
    (`rediss://`). Certificates are always verified."""

    ca_file: types.ReadableFile | None = None
    """The certificate authorities by which the broker's and Redis's certificates are checked. None: the operating
    system's. Example: /etc/lanekeeper/ca.pem"""
    cert_file: types.ReadableFile | None = None
    """Lanekeeper's own certificate, for a broker or Redis that asks for one. Example: /etc/lanekeeper/client.pem"""
    key_file: types.ReadableFile | None = None
    """The key of `cert_file`, not encrypted. None: it is in the certificate's file. Example:
    /etc/lanekeeper/client.key"""
    plain_hosts: Annotated[tuple[str, ...], BeforeValidator(words)] = ()
    """Hosts to which the profile `production` accepts unencrypted connections. Example: rabbitmq,redis"""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.key_file is not None and self.cert_file is None:
            yield clash("key_file is given without cert_file", "key_file")
        try:
            self.given_context()
        except (ssl.SSLError, OSError) as error:
            yield clash(f"ca_file, cert_file or key_file cannot be used: {error}", "ca_file", "cert_file", "key_file")

    def for_redis(self) -> dict[str, str]:
        """The files as arguments of redis-py."""
        files = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        return {name: str(file) for name, file in files.items() if file is not None}

    def given_context(self) -> ssl.SSLContext | None:
        """The TLS context for https. None if no file is set: then the HTTP library's default is used."""
        return None if self.ca_file is None and self.cert_file is None else self.context()

    def context(self) -> ssl.SSLContext:
        """A TLS context that verifies the server's certificate, and presents `cert_file` if it is set."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            # Without `password`, OpenSSL would ask for that of an encrypted key on the terminal; a service has none.
            context.load_cert_chain(self.cert_file, self.key_file, password=lambda: "")
        return context


class ReplySettings(Section):
    """Says to which queues workers may send replies."""

    allow: types.Patterns | None = None
    """The queues to which replies may go, as shell patterns. None: all queues that the contract allows. Example:
    amq.gen-*,lane.reply.*"""
    bound_to_user: bool | None = None
    """Whether replies go only to the user who published the request: by direct reply-to, or to `lane.reply.<user_id>`.
    None: true with the profile `production`, else false. Example: true"""


class ResultSettings(Section):
    """How long results are kept, and how much space they may use. After a result was removed, a further request with
    the same message id is no longer recognised as a repetition."""

    keep_s: Number[float] = Field(default=StoreSpec().keep_s, ge=1, le=YEAR_S)
    """How long a result is kept, and a further request with its id recognised as a repetition."""
    max_bytes: Number[int] = Field(default=StoreSpec().max_bytes, ge=MIB, le=1024 * GIB)
    """The maximum size of the store. When it is larger, the oldest rows of the tenants that have most are deleted; in
    Redis also when 7/8 of its `maxmemory` are used."""
    answer_bytes: Number[int] | None = Field(default=None, ge=64 * 1024, le=512 * MIB)
    """The maximum size of an answer; the request of a larger one ends as `answer_too_large`. None: 32 MiB if there is a
    store for large answers (LANEKEEPER_BODIES__URL), else 16 MiB or the broker's limit. Example: 33554432"""


class ControlSettings(Section):
    """Limits for a tenant's control messages (cancel, result, status), so that no tenant delays those of another."""

    per_tenant_s: Number[float] = Field(default=100, ge=1, le=100_000)
    """How many control messages of one tenant a process carries out in a second; in a burst, five times as many. Others
    are answered `too_many_control_messages`, at most the same number in a second."""
    unseen_per_tenant: Number[int] = Field(default=StoreSpec().unseen_per_tenant, ge=1, le=10_000_000)
    """How many cancellations of one tenant are kept for ids that no worker has seen yet. When there are more, the
    oldest is deleted."""
    operators: types.UserNames | None = None
    """AMQP users that may pause and resume lanes, tenants, applications, models and providers (docs/brake.md). None:
    the worker's own user. Example: ops"""


class WaitingSettings(Section):
    """Limits for requests whose publisher asked for a delay of more than a minute, and for pipelines that wait."""

    per_tenant: Number[int] = Field(default=StoreSpec().waiting_per_tenant, ge=1, le=100_000_000)
    """How many requests of one tenant may wait for a delay of more than a minute, or for the items of a pipeline; each
    begun 16 KiB of a body counts as one. Further ones are answered `too_many_waiting`. As many posts to webhooks may
    wait."""
    in_all: Number[int] = Field(default=StoreSpec().waiting_in_all, ge=1, le=1_000_000_000)
    """The same for all tenants together."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.per_tenant > self.in_all:
            text = f"per_tenant ({self.per_tenant}) is above in_all ({self.in_all}); lower it, or raise in_all"
            yield clash(text, "per_tenant", "in_all")


class FilesSettings(Section):
    """Limits for the files that tenants keep at providers (`/v1/files`). A file beyond them is refused, as the API
    refuses one beyond the organization's quota."""

    per_tenant: Number[int] = Field(default=StoreSpec().files_per_tenant, ge=1, le=1_000_000)
    """How many files a tenant may have, with those that the provider's tools have made for it."""
    bytes_per_tenant: Number[int] = Field(default=50 * GIB, ge=MIB, le=1024 * GIB)
    """The size of all files that a tenant has uploaded. Anthropic's quota of an organization is 500 GB."""


class DeadSettings(Section):
    """How many dead letters are kept, and for how long."""

    max_count: Number[int] = Field(default=DeadSpec().max_count, ge=1, le=1_000_000_000)
    """How many dead letters the broker keeps at most. Once a minute, if there are more, the oldest of the tenants that
    have most are written to `folder`, or dropped if it is not set, until seven eighths of this are left, with a warning
    and the event `removed`."""
    max_bytes: Number[int] = Field(default=DeadSpec().max_bytes, ge=MIB, le=1024 * GIB)
    """The maximum size of the bodies of all dead letters together; beyond it the same is done."""
    keep_s: Number[float] = Field(default=DeadSpec().keep_s, ge=1, le=10 * YEAR_S)
    """How long a dead letter is kept."""
    folder: Path | None = None
    """The folder to which removed dead letters are written: one file of JSON lines a day. None: they are dropped.
    Example: /var/lib/lanekeeper/dead"""
    invalid_per_hour: Number[float] = Field(default=INVALID_PER_HOUR, ge=1, le=1_000_000_000)
    """How many invalid messages of one tenant a process keeps as dead letters in an hour; each begun 64 KiB of a
    message counts as one. Further ones are only answered."""

    def spec(self) -> DeadSpec:
        return DeadSpec(max_count=self.max_count, max_bytes=self.max_bytes, keep_s=self.keep_s, folder=self.folder)


class RetrySettings(Section):
    """The pauses between attempts."""

    base_s: Number[float] = Field(default=RetryPolicy().base_s, gt=0, le=3600)
    """The first pause after an overload or a rate limit of the provider. After any other failure it is a quarter of
    this."""
    span_s: Number[float] = Field(default=RetryPolicy().span_s, gt=0, le=86_400)
    """All pauses of a request together last at least this long, if its deadline allows that."""
    cap_s: Number[float] = Field(default=RetryPolicy().cap_s, gt=0, le=86_400)
    """The longest pause between two attempts; up to half of it is added at random."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.base_s > self.cap_s:
            yield clash(f"base_s ({self.base_s:g}) is above cap_s ({self.cap_s:g})", "base_s", "cap_s")


WEB = ("https://", "http://")
_URL = re.compile(r"[a-z][a-z0-9+.-]{1,19}://[!-~]{1,1000}")


def _folder(value: str) -> str:
    if _URL.fullmatch(value) is None or "::" in value or {"?", "#"} & set(value) or "@" in urlsplit(value).netloc:
        raise wrong("a URL such as file:///var/lib/lanekeeper/bodies or s3://bucket/bodies, without password")
    return value.rstrip("/")


def _store(value: str) -> str:
    if value.startswith(WEB):
        raise wrong("the URL of a folder or bucket that can be written, such as file:///… or s3://…")
    return _folder(value)


FolderUrl = Annotated[str, AfterValidator(_folder)]
BodyStoreUrl = Annotated[str, AfterValidator(_store)]


class BodiesSettings(Section):
    """Bodies of requests and answers that are too large for an AMQP message are kept in a store, and the message
    contains only their address."""

    url: BodyStoreUrl | None = None
    """The store of large bodies and answers: a folder (`file:///…`), or any other URL that the Python library fsspec
    supports (`s3://…`, if its driver is installed). None: a folder beside the file of the SQLite store; with Redis,
    large bodies are refused. Example: s3://lanekeeper/bodies"""
    over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=MIB)
    """A larger body is kept in the store, and the message contains only its address."""
    answers_over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=512 * MIB)
    """A larger answer is kept in the store, and the reply contains only its address. Raise this if requesters cannot
    reach the store."""
    most_bytes: Number[int] = Field(default=MOST_BYTES, ge=MIB, le=512 * MIB)
    """The maximum size of a request's body. Anthropic accepts 32 MiB."""
    in_all_bytes: Number[int] = Field(default=IN_ALL_BYTES, ge=MIB, le=1024 * GIB)
    """The maximum size of all bodies in the store together. A tenant may use at most as much as it leaves free for the
    others; beyond that its large bodies are refused."""
    keep_s: Number[float] = Field(default=KEEP_S, ge=60, le=10 * YEAR_S)
    """The longest time that a request's body stays in the store. Answers stay as long as results."""
    allow: Annotated[tuple[FolderUrl, ...], BeforeValidator(words)] = ()
    """URLs below which workers may fetch the bodies that `x-lane-body` names (https, or any URL that fsspec reads);
    gateways fetch stored answers from them, except over https. If you change LANEKEEPER_BODIES__URL, list the old URL
    here. Example: s3://crm-bodies/lane,https://files.example.com/prompts"""
    allow_private: bool = False
    """Whether the hosts in `allow` may have private, loopback or link-local addresses. Example: true"""

    def allowed_stores(self) -> list[BodyStore]:
        """A `BodyStore` for each URL in `allow` that is not an http(s) URL. It creates and opens nothing before it is
        used."""
        return [BodyStore(url) for url in self.allow if not url.startswith(WEB)]


KEYS_AT_MOST = 1000
"""How many API keys the gateway's settings may have at most."""
_HASH = re.compile(r"[0-9a-f]{64}")


OperatorRight = Literal["no", "look", "act"]
OPERATOR_RIGHTS: tuple[OperatorRight, ...] = get_args(OperatorRight)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayKey:
    """What a caller with one of the gateway's API keys may do: for which tenant, in which lanes, with which models."""

    tenant: str | None
    """The tenant to which the caller's requests belong. None: they belong to no tenant, which is only possible if no
    keys are set."""
    lanes: tuple[str, ...] | None = None
    """The lanes that calls may name; the first is that of calls that name none. None: all."""
    models: tuple[str, ...] | None = None
    """The models that calls may name. None: all."""
    pipelines: tuple[str, ...] = ()
    """The pipelines that calls may run also if the key does not allow the lanes and models of their steps."""
    expires_at: float | None = None
    """From when on the key is not valid any longer (seconds since 1970). None: it does not expire."""
    name: str = ""
    """The key's name: caps and operators' actions name it. By default the first eight digits of its hash."""
    operator: OperatorRight = "no"
    """Whether calls may see ("look"), or also change ("act"), what all tenants' requests do: dead letters, pauses, all
    lanes."""


def _key(value: Mapping[str, Any]) -> GatewayKey:
    if not value.keys() <= {"tenant", "lanes", "models", "pipelines", "expires", "operator", "name"}:
        raise ValueError
    given: dict[str, Any] = {"tenant": types.read_tenant(value["tenant"])}
    if "lanes" in value:
        given["lanes"] = types.not_empty(tuple(words(value["lanes"])))
    if "models" in value:
        given["models"] = types.read_models(value["models"])
    if "pipelines" in value:
        given["pipelines"] = types.not_empty(tuple(words(value["pipelines"])))
    if "expires" in value:
        given["expires_at"] = _moment(value["expires"]).timestamp()
    if "name" in value:
        if not isinstance(value["name"], str) or not is_request_id(value["name"]):
            raise ValueError
        given["name"] = value["name"]
    if "operator" in value:
        if value["operator"] not in OPERATOR_RIGHTS:
            raise ValueError
        given["operator"] = value["operator"]
    return GatewayKey(**given)


def _moment(value: Any) -> datetime:
    found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    if found.tzinfo is None:
        raise ValueError
    return found


def _named(keys: Mapping[str, GatewayKey]) -> Mapping[str, GatewayKey]:
    return {hashed: key if key.name else replace(key, name=hashed[:8]) for hashed, key in keys.items()}


KeyTable = Annotated[
    Mapping[str, GatewayKey],
    types.each_of(
        matching(_HASH, "the SHA-256 of a key"),
        _key,
        "for each key's SHA-256 (`lanekeeper key new` prints it) a table: tenant, and perhaps lanes (the first is the "
        "default; without a list all), models, pipelines (those that may use other lanes and models), name, "
        "expires (a time with its zone, such as 2027-01-31T18:00:00Z), and operator (no, look or act: whether it may "
        "see or change what all tenants' requests do); in the environment "
        "as JSON",
    ),
    Field(max_length=KEYS_AT_MOST),
    AfterValidator(_named),
]


class GatewaySettings(Section):
    """The settings of a process's HTTP server: its address, and the API keys and limits of the gateway."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """The address on which the server listens. If it is not loopback, the gateway requires `keys`. Example: 0.0.0.0"""
    port: Number[int] = Field(default=8080, ge=0, le=65_535)
    """The port on which the server listens; 0: any free port."""
    keys: KeyTable = Field(default={})
    """For the SHA-256 of each API key: tenant, lanes, models, pipelines, when it expires, and whether it is an
    operator's. None:
    all programs on this machine may call. A changed file is read again. Example:
    {"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08": {"tenant": "crm", "lanes": ["normal"]}}"""
    origins: types.Origins = ()
    """The origins of web pages that may call the gateway, beside the gateway's own. Example:
    https://app.example.com"""
    calls: Number[int] = Field(default=1000, ge=1, le=100_000)
    """How many HTTP calls are answered at the same time, shared by tenants. Further ones get the status 529."""
    followers: Number[int] = Field(default=1000, ge=1, le=100_000)
    """How many HTTP calls may wait for a request's end (`?wait=`), or receive its events, at the same time. Further
    ones get the status 529."""
    ping_every_s: Number[float] = Field(default=10, ge=0.05, le=600)
    """A streamed call gets a `ping` event whenever nothing was sent to it for this many seconds."""
    lookups_per_min: Number[float] = Field(default=2000, ge=1, le=1_000_000)
    """How many calls of `count_tokens`, `models` and `files` the gateway passes on in a minute; one of several tenants
    may use half."""
    batches_per_tenant: Number[int] = Field(default=1000, ge=1, le=100_000)
    """How many groups of one tenant are kept, Message Batches among them. Further ones get the status 429
    (`too_many_waiting`) until some are deleted, or are kept no longer. Workers need it too."""
    batch_bytes_per_tenant: Number[int] = Field(default=GIB, ge=MIB, le=1024 * GIB)
    """The maximum size of all Message Batches of one tenant that have not ended. Further ones get the status 429."""
    cancel_abandoned: bool = True
    """Whether a request without `Idempotency-Key` is cancelled when its client disconnects. Example: false"""


class ClientSettings(Section):
    """The gateway that `lanekeeper batch` calls."""

    url: types.ProviderUrl | None = None
    """Its URL. None: the gateway of these settings (`gateway.host`, `gateway.port`). Example:
    https://lanekeeper.example.com"""
    api_key: types.Key | None = None
    """An API key of the gateway, if it needs one. Example: lane-secret"""


LEAST_TOKENS_PER_MIN = LEAST_LIMITS[1]
"""The lowest limit of tokens a minute that an operator may set, because a single request could need more tokens than a
lower limit allows."""
OPENAI_KINDS = ("openai", "azure")
OpenAIDialect = Literal["openai.chat", "openai.responses", "openai.embeddings"]
FIRST = "anthropic"
"""The name of the provider that ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL configure."""
_NEEDS = {
    "anthropic": ("api_key", "base_url"),
    "bedrock": ("region",),
    "vertex": ("region", "project"),
    "foundry": ("api_key", "base_url"),
    "openai": (),
    "azure": ("base_url",),
}
"""For each kind of provider (anthropic, bedrock, …): the settings that it requires."""


_ONLY_OF: Mapping[str, Collection[str]] = {
    "region": ("bedrock", "vertex"),
    "project": ("vertex", "openai"),
    "organization": ("openai",),
    "api_version": ("azure",),
    "dialects": OPENAI_KINDS,
    "sends_priority": ("openai",),
    "admin_key": ("anthropic", "bedrock", "vertex", "foundry"),
}
"""The settings that only some kinds have."""


class LimitsSettings(Section):
    """Limits on the use of a provider, for each line of models (such as Haiku 4.5) by itself, because a provider's own
    limits apply to each line by itself too. The limits set here hold even if the provider allows more."""

    requests_per_min: Number[float] | None = Field(default=None, ge=1)
    """The maximum number of requests a minute, for each line of models (such as Haiku 4.5). None: the provider's own
    limit. Example: 300"""
    input_tokens_per_min: Number[float] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """The maximum number of input tokens a minute, for each line of models. None: the provider's own limit. Example:
    200000"""
    output_tokens_per_min: Number[float] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """The maximum number of output tokens a minute, for each line of models. None: the provider's own limit. Example:
    40000"""
    concurrency: Number[int] | None = Field(default=None, ge=1)
    """The maximum number of calls that a process makes at the same time, for each line of models. For a server of your
    own that takes only so many: its number, divided by the number of workers. None: no limit. Example: 50"""
    admin_key: types.Key | None = None
    """A key of Anthropic's Admin API, with which a worker reads the organization's limits when it starts. None: they
    are learned from answers. Example: sk-ant-admin-secret"""
    batch_requests: Number[int] = Field(default=BatchLimits().requests, ge=1)
    """The most requests in batches that have not ended, for each line of models."""
    batch_tokens: Number[int] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """The most tokens that such requests are expected to use, for each line of models. None: no limit. Example:
    50000000"""

    def limits(self) -> AccountCaps:
        return AccountCaps(
            requests=self.requests_per_min,
            input_tokens=self.input_tokens_per_min,
            output_tokens=self.output_tokens_per_min,
            concurrency=self.concurrency,
        )

    def batch_limits(self) -> BatchLimits:
        return BatchLimits(requests=self.batch_requests, tokens=self.batch_tokens)


class ProviderSettings(LimitsSettings):
    """A provider in addition to the first one; the user chooses its name. For Bedrock and Vertex, credentials that are
    not given here are found by Amazon's and Google's own libraries."""

    kind: Literal["anthropic", "bedrock", "vertex", "foundry", "openai", "azure"] = "anthropic"
    """The kind of API. `anthropic`, `openai`: any server at `base_url` that behaves like Anthropic's or OpenAI's.
    Example: bedrock"""
    api_key: types.Key | None = None
    """The provider's key. For `bedrock`, `vertex` and `azure`, Amazon's, Google's and Microsoft's own libraries find
    the credentials; a server of your own of kind `openai` may need none. Example: sk-secret"""
    base_url: types.ProviderUrl | None = None
    """The URL of the API, where it is not the provider's own: of a server of the kind `openai` with `/v1`, of `azure`
    the resource's. Example: https://other.example.com/v1"""
    region: types.PlaceName | None = None
    """The cloud region, for the kinds `bedrock` and `vertex`. Example: eu-central-1"""
    project: types.AccountName | None = None
    """The Google Cloud project, for the kind `vertex`; OpenAI's project, for `openai`. Example: my-project"""
    organization: types.AccountName | None = None
    """OpenAI's organization, for the kind `openai`. None: the key's own. Example: org-example"""
    api_version: types.AzureVersion | None = None
    """The version of Azure's API, for the kind `azure`. None: the API without versions, below `/openai/v1`. Example:
    2024-10-21"""
    dialects: Annotated[tuple[OpenAIDialect, ...] | None, BeforeValidator(words)] = None
    """For the kinds `openai` and `azure`: the dialects that the server speaks. None: all of OpenAI's. Example:
    openai.chat,openai.embeddings"""
    embeddings_inputs: Number[int] = Field(default=2048, ge=1)
    """For the kinds `openai` and `azure`: how many inputs a gathered call for embeddings may have. The default is
    OpenAI's limit."""
    embeddings_tokens: Number[int] = Field(default=300_000, ge=1)
    """For the kinds `openai` and `azure`: how many tokens a gathered call for embeddings may have, as it is
    estimated. The default is OpenAI's limit."""
    sends_priority: bool = False
    """For the kind `openai`: whether each call has the rank of its lane as `priority`, by which a vLLM server with
    `--scheduling-policy priority` orders its queue. Example: true"""
    anthropic_version: types.CloudVersion | None = None
    """The version of Anthropic's API for requests that name none, also by their lane. None: the setting
    `anthropic_version`, which Bedrock and Vertex have under names of their own. Example: bedrock-2023-05-31"""
    models: types.ModelNames | None = None
    """The provider's name for each model that it offers. None: all, under Anthropic's names. Example:
    claude-sonnet-5-5=anthropic.claude-sonnet-5-5"""

    @property
    def spoken(self) -> Collection[str]:
        """The dialects that the provider speaks."""
        if self.kind not in OPENAI_KINDS:
            return (ANTHROPIC_MESSAGES,)
        return OPENAI_DIALECTS if self.dialects is None else self.dialects

    def disagreements(self) -> Iterator[Disagreement]:
        needs = _NEEDS[self.kind]
        for name in needs:
            if name != "api_key" and getattr(self, name) is None:
                yield clash(f"not set; a provider of kind {self.kind} needs it", name)
        for name, kinds in _ONLY_OF.items():
            if self.kind not in kinds and getattr(self, name) not in (None, False):
                yield clash(f"a provider of kind {self.kind} has none; remove it", name)

        if self.models is not None and not self.models:
            yield clash("names no model; where it has all of them, leave it out", "models")

    def missing_for_calls(self) -> Iterator[Disagreement]:
        """Find missing settings that only a process which calls providers needs. In other processes they may be
        missing, because an application may use the same settings file without the provider's key."""
        needs_key = "api_key" in _NEEDS[self.kind] or (self.kind == "openai" and self.base_url is None)
        if needs_key and self.api_key is None:
            yield clash(f"not set; a provider of kind {self.kind} needs it", "api_key")


class MetricsSettings(Section):
    """What metrics may name."""

    tenants: types.UserNames = ()
    """The tenants of which metrics tell figures of their own: each one adds a dozen time series to each worker, and
    `/metrics` needs no key. Example: crm"""


class ModelsSettings(Section):
    """Fallback models, and the models that a tenant may use."""

    fallbacks: types.ModelNames = Field(default_factory=dict)
    """For a model: the one that is called when no provider can answer with it. Example:
    claude-sonnet-5-5=claude-haiku-5-5"""
    fallback_on_refusal: bool = False
    """Whether the fallback is asked too, once, if the model refuses (`stop_reason: refusal`). Of a stream, only if no
    content came before the refusal. Both calls are paid. Example: true"""
    tenants: types.ModelLists = Field(default_factory=dict)
    """The only models that a tenant may use. Tenants not listed may use all. Example: {"crm": ["claude-haiku-5-5"]}"""


class SharedLimitsSettings(Section):
    """Which models share a provider's limits. The table that Lanekeeper has is Anthropic's of October 2026."""

    lines: types.LimitLines = Field(default_factory=dict)
    """For each name of a line, the models in it: names, or patterns with *. Models that are not listed are grouped by
    the built-in table. Example: {"sonnet": ["claude-sonnet-*"]}"""


class PricesSettings(Section):
    """What models cost. The prices are those of the package genai-prices, unless they are set here."""

    as_of: types.Day | None = None
    """The day whose prices are used. None: the day of the call. Example: 2026-11-01"""
    models: types.PriceTable = Field(default_factory=dict)
    """Prices in US dollars per million tokens, for models that the table lacks or that cost you something else.
    Example: {"my-model": {"input": 1, "output": 5}}"""
    batch: Number[float] = Field(default=BATCH_SHARE, ge=0, le=1)
    """What an answer in a provider's batch costs, as a share of its price in a live call."""

    def table(self) -> Prices:
        as_of = None if self.as_of is None else date.fromisoformat(self.as_of)
        return Prices(self.models, as_of=as_of, batch=self.batch)


class CapSettings(Section):
    """Limits for what a lane may use in one day, week or month (UTC)."""

    requests: Number[float] | None = Field(default=None, gt=0)
    """The most requests of this lane in a day (UTC). Example: 10000"""
    tokens: Number[float] | None = Field(default=None, gt=0)
    """The most input and output tokens of this lane in a day (UTC). Example: 5000000"""
    usd: Number[float] | None = Field(default=None, gt=0)
    """The most US dollars of this lane in a day (UTC). Example: 25"""
    week: types.CapOfOne | None = None
    """The same for a week from Monday on (UTC). Example: {"usd": 100}"""
    month: types.CapOfOne | None = None
    """The same for a calendar month (UTC). Example: {"usd": 300}"""

    def caps(self) -> Caps:
        day = Cap(requests=self.requests, tokens=self.tokens, usd=self.usd)
        found = {DAY: day, WEEK: self.week, MONTH: self.month}
        return {per: cap for per, cap in found.items() if cap is not None and cap != Cap()}


class LaneBudgetSettings(Section):
    """One lane's share of the providers' budgets, that is, of what the providers' limits allow in a minute."""

    share: Number[float] | None = Field(default=None, gt=0, le=1)
    """The share of each provider's budget (what its limits allow in a minute) that is reserved for this lane. The rest
    goes to the most urgent request that waits. None: by the lane's rank, like 0.3, 0.2 and 0.05 of the default lanes.
    Example: 0.1"""


class BudgetSettings(LimitsSettings):
    """How the lanes share the providers' budgets, that is, the requests and tokens that the limits allow in a minute.
    The limits here apply to the first provider; other providers have their own settings. Limits that a provider
    sends in its headers always hold as well."""

    lanes: dict[str, LaneBudgetSettings] = Field(default_factory=dict)
    burst_s: Number[float] = Field(default=BudgetSpec().burst_s, gt=0, le=60)
    """What a provider's limits allow and is not used accumulates for at most this many seconds."""
    overflow_s: Number[float] | None = Field(default=None, gt=0, le=3600)
    """A request that would wait longer than this for a provider's limits goes to the next provider, if the wait there
    is shorter. None: the lane's `target_wait_s`. Example: 5"""


class FairSettings(Section):
    """How tenants share the slots of a lane, each of which works on one request at a time (docs/fairness.md)."""

    tenants: types.ShareTable = Field(default_factory=dict)
    """`weight`: a tenant's share relative to the others, 1 by default. `in_flight`: how many of its requests a process
    works on at a time in one lane. `*`: each tenant that is not listed. Example: {"*": {"in_flight": 8}, "crm":
    {"weight": 2}}"""


class CapsSettings(Section):
    """Limits for what lanes, tenants, API keys and users may use in a day, a week or a month (UTC). A running worker
    reads them again when `lanekeeper.toml` changes."""

    lanes: dict[str, CapSettings] = Field(default_factory=dict)
    tenants: types.TenantCaps = Field(default_factory=dict)
    """What each tenant may use in a day (UTC), and in a `week` or a `month`. `*`: each tenant that is not listed.
    Example: {"*": {"usd": 5, "month": {"usd": 50}}, "crm": {"requests": 10000}}"""
    keys: types.NameCaps = Field(default_factory=dict)
    """The same for the gateway's API keys, by the key's `name`. `*`: each key that is not listed. Example:
    {"*": {"usd": 2}}"""
    users: types.NameCaps = Field(default_factory=dict)
    """The same for the users that requests name in `metadata.user_id`. `*`: each user that is not listed. Example:
    {"*": {"tokens": 200000}}"""

    def spec(self) -> CapsSpec:
        return CapsSpec(
            lanes={name: cap.caps() for name, cap in self.lanes.items()},
            tenants=self.tenants,
            keys=self.keys,
            users={user if user == EVERY_TENANT else user_hash(user): caps for user, caps in self.users.items()},
        )


_PORTS = {"amqp": 5672, "amqps": 5671}
_LOOPBACK = {"127.0.0.1", "::1"}


def state_folder() -> Path:
    """Lanekeeper's folder below the one in which this user's programs keep their state, according to the XDG Base
    Directory Specification."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the specification says that a relative path is ignored
        try:
            base = Path.home() / ".local/state"
        except RuntimeError:  # a user without name and home, in a container
            base = Path("/var/lib")
    return base / "lanekeeper"


def broker_identity(urls: Sequence[str]) -> str:
    """The first host, readable, and a hash of hosts, ports and virtual host. It does not depend on users, passwords and
    the order of a cluster's nodes."""
    parts = [urlsplit(url) for url in urls]
    hosts = ["localhost" if each.hostname in {None, *_LOOPBACK} else str(each.hostname) for each in parts]
    nodes = sorted(f"{host}:{each.port or _PORTS[each.scheme]}" for host, each in zip(hosts, parts, strict=True))
    vhost = unquote(parts[0].path[1:]) or "/"
    hashed = sha256("\n".join((*nodes, vhost)).encode()).hexdigest()[:8]
    return f"{re.sub('[^a-z0-9.-]', '-', min(hosts))[:60]}-{hashed}"


PREFIX: Final = "LANEKEEPER_"
ANTHROPIC_URL: Final = "https://api.anthropic.com"


class Settings(BaseSettings):
    """All settings, validated. Its `repr` contains no secret."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        enable_decoding=False,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
    )

    amqp_url: types.AmqpUrl = SecretStr("amqp://guest:guest@localhost:5672/")
    """The broker's URL, or those of one cluster's nodes, separated by commas. Write special characters in user,
    password and virtual host as %XX. Example: amqps://lanekeeper:secret@rabbit.example.com:5671/prod"""
    management_url: types.HttpUrl | None = None
    """The URL of RabbitMQ's management API, for `lanekeeper topology plan` and `check`. None: port 15672 of the AMQP
    host. Without user and password, those of the AMQP URL are used. Example: https://rabbit.example.com:15671"""
    namespace: types.Namespace = "lane"
    """The prefix of all names on the broker. Example: staging"""
    anthropic_api_key: types.Key | None = Field(default=None, alias="ANTHROPIC_API_KEY")
    """The API key of the provider named `anthropic`. `serve --simulate` needs none. Example: sk-ant-secret"""
    anthropic_base_url: types.ProviderUrl | None = Field(default=None, alias="ANTHROPIC_BASE_URL")
    """The URL of the provider `anthropic`. None: https://api.anthropic.com. Example:
    https://gateway.example.com/anthropic"""
    anthropic_version: types.ApiVersion = DEFAULT_VERSION
    """The version of Anthropic's API (header `anthropic-version`) for requests that name none, unless their lane or the
    provider has another."""
    anthropic_headers: types.HeaderPatterns = ("anthropic-*",)
    """Which `anthropic-*` headers of requests are passed on to providers, as names or patterns; others are left out.
    `anthropic-version` and `anthropic-beta` always are. Example: anthropic-user-profile-id"""
    providers: dict[str, ProviderSettings] = {}
    models: ModelsSettings = ModelsSettings()
    prices: PricesSettings = PricesSettings()
    caps: CapsSettings = CapsSettings()
    limits: SharedLimitsSettings = SharedLimitsSettings()
    fair: FairSettings = FairSettings()
    handlers: dict[str, HandlerSettings] = {}
    pipelines: dict[str, PipelineSettings] = {}
    schedules: dict[str, ScheduleSettings] = {}
    metrics: MetricsSettings = MetricsSettings()
    budget: BudgetSettings = BudgetSettings()
    lanes: Annotated[dict[str, LaneSettings], BeforeValidator(_with_defaults)] = Field(
        default={}, validate_default=True
    )
    gateway: GatewaySettings = GatewaySettings()
    client: ClientSettings = ClientSettings()
    tls: TlsSettings = TlsSettings()
    reply_to: ReplySettings = ReplySettings()
    retry: RetrySettings = RetrySettings()
    store_url: types.StoreUrl | None = None
    """The store of results, claims and counters: `sqlite:////file` for one machine, `redis://` for several,
    `redis+sentinel://host:26379,host2:26379/service/0` for a Redis that Sentinels name. None: a SQLite file in the
    user's state folder (`lanekeeper check` shows it). Example: redis://:secret@redis.example.com:6379/0"""
    results: ResultSettings = ResultSettings()
    bodies: BodiesSettings = BodiesSettings()
    control: ControlSettings = ControlSettings()
    webhooks: WebhooksSettings = WebhooksSettings()
    waiting: WaitingSettings = WaitingSettings()
    files: FilesSettings = FilesSettings()
    dead: DeadSettings = DeadSettings()
    speakers: types.UserNames = ()
    """AMQP users (such as a gateway's) that may publish, cancel and fetch for other tenants. Example: gateway"""
    profile: Literal["production"] | None = None
    """`production`: a worker does not start while `lanekeeper check` finds any of the risks in docs/production.md.
    None: the check only warns. Example: production"""
    require_user_id: bool | None = None
    """Whether requests without the AMQP property `user_id` are refused; else they belong to one common tenant. None:
    true with the profile `production`, else false. Example: true"""
    failpoints: types.Chances = {}
    """For tests: places (`consumers/settle.py`) at which the process kills itself. Example: after_store:0.2"""
    json_values: Number[int] = Field(default=VALUES, ge=1000, le=10_000_000)
    """How many keys and values the JSON of a request (else `too_large`) or an answer (else `answer_too_large`) may
    have."""
    held_bytes: Number[int] = Field(default=HELD_BYTES, ge=16 * MIB, le=1024 * GIB)
    """How many bytes of messages a worker holds at a time, running and waiting, with what it loads for them; the others
    stay in the broker. The default is for 512 MiB of memory; with more slots for large requests, raise both."""
    grace_s: Number[float] = Field(default=25, ge=0, le=3600)
    """How long running requests may take to finish when the process is stopped; Kubernetes kills it after 30 s."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto`: `console` (readable lines) on a terminal, else `json`. Example: json"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level of our events that is logged; libraries from `warning` on. Example: debug"""
    log_content: bool = False
    """Whether prompts and answers may appear in the log. They never appear in spans or metrics. Example: true"""
    otel_endpoint: types.HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    """The collector of spans and metrics, over OTLP/HTTP. OpenTelemetry's SDK reads all other `OTEL_*` itself. None:
    none are sent. Example: http://jaeger.example.com:4318"""
    jaeger_url: types.HttpUrl | None = None
    """Where people open Jaeger: what shows the id of a trace then has a link to it. Example:
    https://jaeger.example.com"""
    otel_traces_endpoint: types.HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    """The complete URL for spans, instead of `OTEL_EXPORTER_OTLP_ENDPOINT`. Example:
    http://jaeger.example.com:4318/v1/traces"""
    otel_metrics_endpoint: types.HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    """The complete URL for metrics. If set, it is used instead of `OTEL_EXPORTER_OTLP_ENDPOINT`. Example:
    http://collector.example.com:4318/v1/metrics"""
    otel_metrics_exporter: Literal["otlp", "none"] = Field(default="otlp", alias="OTEL_METRICS_EXPORTER")
    """`none`: no metrics are sent over OTLP, because the collector takes none, such as a Jaeger. `/metrics` is served
    nevertheless. Example: otlp"""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`Settings()` has the default values, whatever the environment is: `load_settings` reads the other sources."""
        return (init_settings,)

    def budget_spec(self) -> BudgetSpec:
        """The limits for calls to the providers (their accounts' budgets), and how the lanes share them."""
        budget, lanes = self.budget, self.lane_specs()
        shares = {name: lane.share for name, lane in budget.lanes.items() if lane.share is not None}
        return BudgetSpec(
            shares=shares_of(lanes, shares),
            ranks={lane.name: lane.rank for lane in lanes},
            burst_s=budget.burst_s,
            overflow_s=budget.overflow_s,
            accounts={FIRST: budget.limits(), **{name: other.limits() for name, other in self.providers.items()}},
        )

    def admin_keys(self) -> Mapping[str, str]:
        """The keys of Admin APIs, by provider; they must never be shown."""
        found = {FIRST: self.budget.admin_key, **{name: each.admin_key for name, each in self.providers.items()}}
        return {name: key.get_secret_value() for name, key in found.items() if key is not None}

    def batch_limits(self) -> Mapping[str, BatchLimits]:
        """For each provider: how much may be in the batches of one of its accounts."""
        return {
            FIRST: self.budget.batch_limits(),
            **{name: each.batch_limits() for name, each in self.providers.items()},
        }

    def routes_spec(self) -> RoutesSpec:
        """Which provider is called for which model. The first provider (that of ANTHROPIC_API_KEY) is included if it
        has a key, if a lane names it, or if there is no other."""
        orders = {lane.name: self.lanes[lane.name].providers for lane in self.lane_specs()}
        is_wanted = any(FIRST in (names or ()) for names in orders.values())
        first = [ProviderModels(name=FIRST)] if self.api_key or is_wanted or not self.providers else []
        return RoutesSpec(
            providers=(
                *first,
                *(
                    ProviderModels(
                        name=name,
                        models=section.models,
                        dialects=section.spoken,
                        is_pooled=section.kind == "bedrock",
                    )
                    for name, section in sorted(self.providers.items())
                ),
            ),
            lanes={lane: names for lane, names in orders.items() if names},
            lane_models={lane.name: lane.models for lane in self.lane_specs()},
            fallbacks=self.models.fallbacks,
            tenants=self.models.tenants,
            lines={pattern: line for line, patterns in self.limits.lines.items() for pattern in patterns},
        )

    @property
    def has_message_batches(self) -> bool:
        """Whether a provider may have Message Batches, as far as these settings say."""
        return (
            not self.providers
            or self.api_key is not None
            or any(section.kind == "anthropic" for section in self.providers.values())
        )

    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes, the most urgent first."""
        found = (section.spec(name) for name, section in self.lanes.items() if section.enabled)
        return tuple(sorted(found, key=lambda lane: lane.rank))

    def schedule_specs(self) -> tuple[ScheduleSpec, ...]:
        return tuple(section.spec(name) for name, section in sorted(self.schedules.items()))

    def known_names(self) -> Mapping[PauseKind, Collection[str]]:
        """What may be paused, of the kinds of which that is known."""
        return {"lane": [lane.name for lane in self.lane_specs()], "schedule": list(self.schedules)}

    def names(self) -> Names:
        return Names(self.namespace)

    def handler_specs(self) -> tuple[HandlerSpec, ...]:
        return tuple(section.spec(name) for name, section in sorted(self.handlers.items()))

    def pipeline_specs(self) -> tuple[PipelineSpec, ...]:
        return tuple(section.spec(name) for name, section in sorted(self.pipelines.items()))

    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(**self.retry.model_dump())

    def reply_rule(self) -> ReplyRule:
        """The rule that says to which queues workers may send replies."""
        allow = self.reply_to.allow
        return ReplyRule(
            names=self.names(),
            allow=None if allow is None else tuple(re.compile(fnmatch.translate(pattern)) for pattern in allow),
            bound=self.binds_replies,
        )

    @property
    def is_production(self) -> bool:
        return self.profile == "production"

    @property
    def needs_user_id(self) -> bool:
        return self.is_production if self.require_user_id is None else self.require_user_id

    @property
    def binds_replies(self) -> bool:
        """Whether replies go only to the user who published the request."""
        bound = self.reply_to.bound_to_user
        return self.is_production if bound is None else bound

    @property
    def broker_url(self) -> str:
        """The AMQP URL, or several separated by commas. They contain passwords and must never be shown."""
        return self.amqp_url.get_secret_value()

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """The AMQP URLs as a tuple (one URL for each node of a cluster). They contain passwords and must never be
        shown."""
        return urls_of(self.broker_url)

    @property
    def broker(self) -> str:
        """The AMQP URLs without users and passwords, for messages and logs."""
        return ", ".join(types.mask_url(url) for url in self.broker_urls)

    @property
    def management(self) -> str | None:
        """The URL of RabbitMQ's management API, with its credentials if any were given; it must never be shown. None:
        it is not set."""
        return _unmasked(self.management_url)

    @property
    def vhost(self) -> str:
        """The virtual host in the AMQP URL."""
        return unquote(urlsplit(self.broker_urls[0]).path[1:]) or "/"

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password of the first AMQP URL."""
        parts = urlsplit(self.broker_urls[0])
        return unquote(parts.username or "guest"), unquote(parts.password or "guest")

    @property
    def operators(self) -> tuple[str, ...]:
        """The AMQP users that may pause and resume."""
        return self.control.operators if self.control.operators is not None else (self.credentials[0],)

    def header_rules(self, provider: str) -> HeaderRules:
        """Which headers this provider gets."""
        section = self.providers.get(provider)
        of_its_own = None if section is None else section.anthropic_version
        return HeaderRules(version=of_its_own or self.anthropic_version, passed=self.anthropic_headers)

    @property
    def provider_url(self) -> str:
        """The first provider's base URL, with credentials if it has any; it must never be shown."""
        return _unmasked(self.anthropic_base_url) or ANTHROPIC_URL

    @property
    def provider(self) -> str:
        """The first provider's base URL without credentials, for messages and logs."""
        return types.mask_url(self.provider_url)

    @property
    def api_key(self) -> str | None:
        """The first provider's API key in plain text; it must never be shown. None: it is not set."""
        return _unmasked(self.anthropic_api_key)

    @property
    def store(self) -> str:
        """The store's URL, with its password if it has one; it must never be shown. By default it is a file whose name
        has the broker's identity, because brokers whose processes run on one machine have nothing in common."""
        if (given := _unmasked(self.store_url)) is not None:
            return given
        file = state_folder() / f"{self.namespace}-{broker_identity(self.broker_urls)}.sqlite"
        return f"sqlite:///{quote(str(file))}"

    @property
    def shown_store(self) -> str:
        """The store's URL without its password, for messages and logs."""
        return self.store if self.store.startswith("sqlite:") else types.mask_url(self.store)

    @property
    def bodies_url(self) -> str | None:
        """The URL of the store for large bodies: the one in the settings, or else that of a folder beside the SQLite
        store's file. None: there is no store for large bodies."""
        if self.bodies.url is not None or not self.store.startswith("sqlite:"):
            return self.bodies.url
        folder = Path(unquote(self.store.removeprefix("sqlite:///"))).absolute().parent / f"{self.namespace}-bodies"
        return f"file://{quote(str(folder))}"

    @property
    def answer_bytes(self) -> int:
        """The size of the largest answer that is sent and stored."""
        if self.results.answer_bytes is not None:
            return self.results.answer_bytes
        return ANSWER_BYTES if self.bodies_url is None else MOST_BYTES

    def body_store(self) -> BodyStore | None:
        """The store of large bodies; None if there is none. It creates and opens nothing before it is used."""
        spec, url = self.bodies, self.bodies_url
        return None if url is None else BodyStore(url, in_all_bytes=spec.in_all_bytes, keep_s=spec.keep_s)

    def store_spec(self) -> StoreSpec:
        return StoreSpec(
            keep_s=self.results.keep_s,
            max_bytes=self.results.max_bytes,
            cancelled_s=max(lane.deadline_max_s for lane in self.lane_specs()) + SEEN_LATE_S,
            unseen_per_tenant=self.control.unseen_per_tenant,
            waiting_per_tenant=self.waiting.per_tenant,
            waiting_in_all=self.waiting.in_all,
            files_per_tenant=self.files.per_tenant,
            groups_per_tenant=self.gateway.batches_per_tenant,
            redis_tls=self.tls.for_redis(),
        )

    @property
    def traces_url(self) -> str | None:
        """The complete URL to which spans are sent; None: no spans are sent."""
        base = _unmasked(self.otel_endpoint)
        return _unmasked(self.otel_traces_endpoint) or (base and f"{base}/v1/traces")

    @property
    def metrics_url(self) -> str | None:
        """The complete URL to which metrics are sent; None: they are only served at `/metrics`."""
        base = _unmasked(self.otel_endpoint)
        url = _unmasked(self.otel_metrics_endpoint) or (base and f"{base}/v1/metrics")
        return url if self.otel_metrics_exporter == "otlp" else None

    @property
    def traces_page(self) -> str | None:
        """The URL of Jaeger's pages, without a slash at its end; None: no links to traces are shown."""
        return _unmasked(self.jaeger_url)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context for the broker; None without TLS."""
        return self.tls.context() if urlsplit(self.broker_urls[0]).scheme == "amqps" else None


def _unmasked(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()


SIMULATED = "simulated"


def in_namespace(settings: Settings, namespace: str, *, store_url: str) -> Settings:
    """A copy of the settings with another namespace and store."""
    return settings.model_copy(update={"namespace": namespace, "store_url": SecretStr(store_url)})


def simulating(settings: Settings, url: str) -> Settings:
    """A copy in which all lanes use only the simulated API at `url`, with the limits of the first provider."""
    limits = {name: getattr(settings.budget, name) for name in LimitsSettings.model_fields if name != "admin_key"}
    given = {"api_key": SIMULATED, **limits}
    providers = {
        SIMULATED: ProviderSettings.model_validate({**given, "base_url": url}),
        f"{SIMULATED}-openai": ProviderSettings.model_validate({**given, "kind": "openai", "base_url": f"{url}/v1"}),
    }
    lanes = {
        name: lane.model_copy(update={"providers": None, "batches": _quick(lane.batches)})
        for name, lane in settings.lanes.items()
    }
    update = {"anthropic_base_url": None, "anthropic_api_key": None, "providers": providers, "lanes": lanes}
    return settings.model_copy(update=update)


def _quick(batches: BatchesSettings) -> BatchesSettings:
    """For one second, unless it is set for how long."""
    usual = BatchesSettings()
    names = ("window_s", "first_poll_s")
    return batches.model_copy(update={name: 1.0 for name in names if getattr(batches, name) == getattr(usual, name)})
