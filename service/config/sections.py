"""Groups of settings, such as those of a lane. The groups for providers and budgets are in
`service/config/budget_sections.py`."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from consumers.dead_letters import DeadSpec
from consumers.job import ATTEMPT_WITHIN_S
from consumers.parking import INVALID_PER_HOUR
from consumers.replies.reply_retries import MAX_WAITING
from consumers.retry import RetryPolicy
from consumers.state.spec import StoreSpec
from service.config.value_types import ModelName, ModelWords, Number, Patterns, ProviderNames, ReadableFile
from topology.lanes import BATCH, CRITICAL, GIB, MIB, NORMAL, LaneSpec

YEAR_S = 365 * 86_400
"""The highest value, in seconds, that most settings of a duration may have: a year."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Settings that are each valid by themselves, but contradict each other; or a missing setting that another setting
    requires."""

    text: str
    at: tuple[tuple[str, ...], ...]
    """The paths of the settings that contradict each other. The error message names those that the user has set."""
    by: tuple[tuple[str, ...], ...] = ()
    """The paths of further settings that contribute to the contradiction; the error message does not name them. If any
    setting of `at` or `by` is wrong by itself, the disagreement is not reported."""

    def under(self, place: tuple[str, ...]) -> "Disagreement":
        """A copy in which `place`, the path of a group of settings, precedes each path: ("slots",) becomes ("lanes",
        "batch", "slots")."""
        return Disagreement(
            self.text,
            tuple((*place, *setting) for setting in self.at),
            tuple((*place, *setting) for setting in self.by),
        )


class Section(BaseModel):
    """A group of settings. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def disagreements(self) -> Iterator[Disagreement]:
        """Find contradictions between settings of this group that are each valid by themselves."""
        return iter(())


class LaneSettings(Section):
    """The settings of one lane. The defaults are in `topology/lanes.py`."""

    slots: Number[int] = Field(ge=1, le=10_000)
    """How many requests of the lane's intake (the queue of new requests) one process works on at the same time: each
    takes one slot. If this is set, the lane gets no additional slots, unless `slots_max` is set as well."""
    slots_min: Number[int] | None = Field(default=None, ge=0, le=10_000)
    """How many idle slots (each for one request) the lane keeps for itself and never lends to other lanes. None: one
    eighth of `slots`, and at least one; for the lane `critical`, two. Example: 4"""
    slots_max: Number[int] | None = Field(default=None, ge=1, le=10_000)
    """The most slots (each for one request at a time) that the lane may have, including slots lent by other lanes and
    slots added because its requests wait too long. None: eight times the default of `slots`; but if `slots` is set, the
    value of `slots`. Example: 64"""
    target_wait_s: Number[float] = Field(gt=0, le=YEAR_S)
    """If requests wait longer than this until one of the lane's slots is free (a slot works on one request at a time),
    the lane gets more slots."""
    call_timeout_s: Number[float] = Field(gt=0, le=ATTEMPT_WITHIN_S)
    """The time limit of one attempt. For a streamed answer it limits the wait for the first token, and every pause
    after it."""
    deadline_s: Number[float] = Field(gt=0, le=YEAR_S)
    """The default and the maximum of a request's deadline: the time from its publishing (or from its due time, if it
    was delayed) to its final answer."""
    max_attempts: Number[int] = Field(ge=1, le=100)
    """How often one request may be tried, including the first attempt."""
    model: ModelName
    """The model for requests that name none. It must have a price, or be listed in a provider's table of models."""
    max_tokens: Number[int] = Field(ge=1, le=1_000_000)
    """The value of `max_tokens`, the maximum length of the answer, for requests that do not set it."""
    models: ModelWords | None = None
    """The models that requests of the lane may name. None: every model. Example: claude-sonnet-5-5,claude-haiku-5-5"""
    providers: ProviderNames | None = None
    """The providers that the lane calls, in this order. None: all providers, first the one that ANTHROPIC_API_KEY
    configures, then the others in the order of their names. Example: anthropic"""
    max_length: Number[int] = Field(ge=1, le=1_000_000_000)
    """How many messages the lane's intake (the queue of new requests) holds at most. When it is full, the broker
    rejects further messages: their publishers get a nack in place of a confirm."""
    max_length_bytes: Number[int] = Field(ge=MIB, le=1024 * GIB)  # at least the largest request
    """The maximum size of all message bodies in the lane's intake (the queue of new requests) together. When it is
    full, the broker rejects further messages."""
    side_queues: Number[int] = Field(ge=0, le=32)
    """The number of the lane's side queues, to which the backlog of a tenant is moved, so that other tenants do not
    wait behind it. If more tenants than this have a backlog, some share a side queue. 0: nothing is moved. After a
    change of this number run `lanekeeper topology apply`."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.models is not None and self.model not in self.models:
            yield Disagreement(
                f"models leaves out the lane's own model, {self.model}; add it, or set another model",
                at=(("models",), ("model",)),
            )
        if self.slots_min is not None and self.slots_min > self.slots:
            yield Disagreement(
                f"slots_min ({self.slots_min}) is above slots ({self.slots}); lower it, or set more slots",
                at=(("slots_min",), ("slots",)),
            )
        if self.slots_max is not None and self.slots_max < self.slots:
            yield Disagreement(
                f"slots_max ({self.slots_max}) is below slots ({self.slots}); raise it, or set fewer slots",
                at=(("slots_max",), ("slots",)),
            )

    @classmethod
    def of(cls, spec: LaneSpec) -> "LaneSettings":
        fields = {name: getattr(spec, name) for name in cls.model_fields if name not in ("models", "providers")}
        return cls(**fields, models=None if spec.models is None else tuple(sorted(spec.models)))

    def spec(self, name: str) -> LaneSpec:
        values = self.model_dump(exclude={"providers", "models"})
        return LaneSpec(name=name, **values, models=None if self.models is None else frozenset(self.models))


class LanesSettings(Section):
    """The settings of the three lanes. Each lane is a field, not an entry of a table, so that one value of one lane can
    be set while its other values keep their defaults."""

    critical: LaneSettings = LaneSettings.of(CRITICAL)
    normal: LaneSettings = LaneSettings.of(NORMAL)
    batch: LaneSettings = LaneSettings.of(BATCH)


class TlsSettings(Section):
    """The TLS settings for connections to the broker (`amqps://`) and to its management API (https). The broker's
    certificate is always verified."""

    ca_file: ReadableFile | None = None
    """A file with the certificate authorities by which the broker's certificate is checked. None: the operating
    system's certificate authorities. Example: /etc/lanekeeper/ca.pem"""
    cert_file: ReadableFile | None = None
    """A file with Lanekeeper's own certificate, for brokers that ask for one. Example: /etc/lanekeeper/client.pem"""
    key_file: ReadableFile | None = None
    """A file with the key of `cert_file`, not encrypted. None: the key is in the certificate's file. Example:
    /etc/lanekeeper/client.key"""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.key_file is not None and self.cert_file is None:
            yield Disagreement("key_file is given without cert_file", at=(("key_file",),), by=(("cert_file",),))
        try:
            self.given_context()
        except (ssl.SSLError, OSError) as error:
            yield Disagreement(
                f"ca_file, cert_file or key_file cannot be used: {error}",
                at=(("ca_file",), ("cert_file",), ("key_file",)),
            )

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
    """Says to which queues workers may send replies, and how many replies may wait because their queue is full."""

    allow: Patterns | None = None
    """The queues to which replies may go, as shell patterns. None: all queues that the contract allows. Example:
    amq.gen-*,lane.reply.*"""
    bound_to_user: bool | None = None
    """Whether replies go only to the user who published the request: by direct reply-to, or to `lane.reply.<user_id>`.
    Other queues are then refused, even those named by the broker, because their owner is unknown. None: true with the
    profile `production`, else false. Example: true"""
    waiting: Number[int] = Field(default=MAX_WAITING, ge=1, le=100_000)
    """How many replies of one process may wait in the broker to be sent again because their queue was full. At most a
    tenth of them may belong to one tenant; or, for requests without `user_id`, to one reply queue. Replies beyond these
    limits are not sent again, but the results can still be fetched by the requests' ids."""


class ResultSettings(Section):
    """How long results are kept, and how much space they may use. After a result was removed, a further request with
    the same message id is no longer recognised as a repetition."""

    keep_s: Number[float] = Field(default=StoreSpec().keep_s, ge=1, le=YEAR_S)
    """How long the result of a request is kept. For the same time a further request with the same id is recognised as a
    repetition."""
    max_bytes: Number[int] = Field(default=StoreSpec().max_bytes, ge=MIB, le=1024 * GIB)
    """The maximum size of the SQLite file. When the file is larger, the oldest results are deleted. With a store in
    Redis, set `maxmemory` in Redis itself."""
    answer_bytes: Number[int] | None = Field(default=None, ge=64 * 1024, le=512 * MIB)
    """The maximum size of an answer. If an answer is larger, its request ends with the error `answer_too_large`. None:
    32 MiB if there is a store for large answers (LANEKEEPER_BODIES__URL), else 16 MiB, which RabbitMQ 4 accepts as one
    message; if the broker's limit is lower, that limit applies. Example: 33554432"""


class ControlSettings(Section):
    """Limits for a tenant's control messages (cancel, result, status), so that no tenant delays those of another."""

    per_tenant_s: Number[float] = Field(default=100, ge=1, le=100_000)
    """How many control messages of one tenant a process carries out in a second; in a burst, five times as many.
    Messages beyond this limit are answered with the error `too_many_control_messages`, at most the same number in a
    second; all others are dropped without an answer. Carrying out a message costs up to 1 ms of CPU, so by default one
    tenant can use a tenth of a core. Dropping a message costs 0.1 ms."""
    unseen_per_tenant: Number[int] = Field(default=StoreSpec().unseen_per_tenant, ge=1, le=10_000_000)
    """How many cancellations of one tenant are kept for ids that no worker has seen yet. When there are more, the
    oldest is deleted. The default is the number of requests that the intake (the queue of new requests) of the lane
    `critical` can hold; so many cancellations take 8 MB of the store."""


class WaitingSettings(Section):
    """Limits for requests whose publisher asked for a delay of more than a minute."""

    per_tenant: Number[int] = Field(default=StoreSpec().waiting_per_tenant, ge=1, le=100_000_000)
    """How many requests of one tenant may wait for a delay of more than a minute. A request with a body of more than 16
    KiB counts as several: one for each 16 KiB or part of that. So the default allows at most 160 MiB on the broker's
    disks. Further requests are answered `too_many_waiting`."""
    in_all: Number[int] = Field(default=StoreSpec().waiting_in_all, ge=1, le=1_000_000_000)
    """How many requests of all tenants together may wait for a delay of more than a minute. The default is ten times
    the default for one tenant, and so allows at most 1.6 GiB on the broker's disks."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.per_tenant > self.in_all:
            yield Disagreement(
                f"per_tenant ({self.per_tenant}) is above in_all ({self.in_all}); lower it, or raise in_all",
                at=(("per_tenant",), ("in_all",)),
            )


class DeadSettings(Section):
    """How many dead letters are kept, and for how long."""

    max_count: Number[int] = Field(default=DeadSpec().max_count, ge=1, le=1_000_000_000)
    """How many dead letters the broker keeps at most. Once a minute the oldest beyond this number are written to
    `folder`, or dropped if `folder` is not set. A warning, the event `removed` and a count in `status` report the
    removal."""
    max_bytes: Number[int] = Field(default=DeadSpec().max_bytes, ge=MIB, le=1024 * GIB)
    """The maximum size of the bodies of all dead letters together. This size is estimated from the sizes of the oldest
    dead letters, because AMQP does not report it."""
    keep_s: Number[float] = Field(default=DeadSpec().keep_s, ge=1, le=10 * YEAR_S)
    """How long a dead letter is kept. The default is 30 days, so that no dead letter is lost during an operator's
    holidays."""
    folder: Path | None = None
    """The folder to which dead letters are written when they are removed from the broker: one file of JSON lines a day,
    which only the worker's operating system user can read. None: they are dropped. Example: /var/lib/lanekeeper/dead"""
    invalid_per_hour: Number[float] = Field(default=INVALID_PER_HOUR, ge=1, le=1_000_000_000)
    """How many invalid messages of one tenant a process keeps as dead letters in an hour. A message of more than 64 KiB
    counts as several: one for each 64 KiB or part of that. So the default allows at most 64 MiB. Further invalid
    messages are answered, but neither kept as dead letters nor stored under their ids. Valid requests that failed are
    always kept."""

    def spec(self) -> DeadSpec:
        return DeadSpec(max_count=self.max_count, max_bytes=self.max_bytes, keep_s=self.keep_s, folder=self.folder)


class RetrySettings(Section):
    """The pauses between attempts. `consumers/retry.py` gives the reasons for the defaults."""

    base_s: Number[float] = Field(default=RetryPolicy().base_s, gt=0, le=3600)
    """The first pause of a request if its attempt failed because the provider was overloaded or refused it by a rate
    limit. After any other failure the first pause is a quarter of this, which is also the shortest pause of all."""
    span_s: Number[float] = Field(default=RetryPolicy().span_s, gt=0, le=86_400)
    """All pauses of a request together last at least this long, if its deadline allows that, so that a provider's
    outage of this length is over before the last attempt."""
    cap_s: Number[float] = Field(default=RetryPolicy().cap_s, gt=0, le=86_400)
    """The longest pause between two attempts, without the random time of up to half of the pause that is added to each
    pause."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.base_s > self.cap_s:
            yield Disagreement(
                f"base_s ({self.base_s:g}) is above cap_s ({self.cap_s:g})", at=(("base_s",), ("cap_s",))
            )
