"""The settings' sections, but for those of providers and their budget (`service/config/budget_sections.py`)."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from consumers.dead_letters import DeadSpec
from consumers.job import ATTEMPT_WITHIN_S
from consumers.parking import INVALID_PER_HOUR
from consumers.replies.retelling import WAITING
from consumers.retry import RetryPolicy
from consumers.state.spec import StoreSpec
from service.config.value_types import ModelName, ModelWords, Number, Patterns, ProviderNames, ReadableFile
from topology.codec.bounds import ANSWER_BYTES
from topology.lanes import BATCH, CRITICAL, GIB, MIB, NORMAL, LaneSpec

YEAR_S = 365 * 86_400


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Settings that are each right by themselves, and do not go together; or one that another needs."""

    text: str
    at: tuple[tuple[str, ...], ...]
    """The places of the settings that it is about: told under those of them that were given."""
    by: tuple[tuple[str, ...], ...] = ()
    """What else it follows from: where one of all these is wrong by itself, this is not told."""

    def under(self, place: tuple[str, ...]) -> "Disagreement":
        """The same of a section that lies there."""
        return Disagreement(
            self.text, tuple((*place, *each) for each in self.at), tuple((*place, *each) for each in self.by)
        )


class Section(BaseModel):
    """A group of settings; nothing else may be in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def disagreements(self) -> Iterator[Disagreement]:
        """What is wrong with values that are each right by themselves."""
        return iter(())


class LaneSettings(Section):
    """One lane; defaults in `topology/lanes.py`."""

    slots: Number[int] = Field(ge=1, le=10_000)
    """Requests of the intake that one process works on at the same time. Where it is set, no slots are added to
    it."""
    slots_min: Number[int] | None = Field(default=None, ge=0, le=10_000)
    """Of its idle slots, those that it never lends to other lanes. None: an eighth of its slots, at least one;
    two of critical. Example: 4"""
    slots_max: Number[int] | None = Field(default=None, ge=1, le=10_000)
    """What its slots may grow to while others lend theirs or requests wait too long. None: eight times its
    slots, or its slots where those are set. Example: 64"""
    target_wait_s: Number[float] = Field(gt=0, le=YEAR_S)
    """Where requests wait longer for a slot, the lane gets more of them."""
    call_timeout_s: Number[float] = Field(gt=0, le=ATTEMPT_WITHIN_S)
    """Bounds one attempt; streamed, its first token and every pause after it."""
    deadline_s: Number[float] = Field(gt=0, le=YEAR_S)
    """Default and maximum of the time from publishing (or the due time) to the final answer."""
    max_attempts: Number[int] = Field(ge=1, le=100)
    """Calls of one request, the first included."""
    model: ModelName
    """Asked where a request names none. It must have a price, or stand in a provider's table."""
    max_tokens: Number[int] = Field(ge=1, le=1_000_000)
    """Of an answer, where a request says none."""
    models: ModelWords | None = None
    """Models that requests may name. None: every one. Example: claude-sonnet-5-5,claude-haiku-5-5"""
    providers: ProviderNames | None = None
    """Which it asks, in this order; none: all, the first provider first, then the others by name. Example:
    anthropic"""
    max_length: Number[int] = Field(ge=1, le=1_000_000_000)
    """Messages that the intake holds; beyond it a publish is refused (not confirmed)."""
    max_length_bytes: Number[int] = Field(ge=MIB, le=1024 * GIB)  # at least the largest request
    """The same in bytes."""
    side_queues: Number[int] = Field(ge=0, le=32)
    """Queues for what is set aside, so that no tenant waits behind another's requests: where more tenants than that
    have a backlog, some share a queue. 0: nothing is set aside. After a change: `lanekeeper topology apply`."""

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
    """The three lanes. Fixed fields, so that one value of one lane can be set alone."""

    critical: LaneSettings = LaneSettings.of(CRITICAL)
    normal: LaneSettings = LaneSettings.of(NORMAL)
    batch: LaneSettings = LaneSettings.of(BATCH)


class GatewaySettings(Section):
    """Where HTTP is served; in this version, health alone. Port 0: any free one."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Where /healthz and /readyz listen. Loopback alone by default. Example: 0.0.0.0"""
    port: Number[int] = Field(default=8080, ge=0, le=65_535)
    """Their port; 0: any free one."""


class TlsSettings(Section):
    """For `amqps://` and the management API over https. The broker's certificate is always verified."""

    ca_file: ReadableFile | None = None
    """Certificates by which the broker's is checked. None: the system's. Example: /etc/lanekeeper/ca.pem"""
    cert_file: ReadableFile | None = None
    """Our own certificate, for brokers that ask for one. Example: /etc/lanekeeper/client.pem"""
    key_file: ReadableFile | None = None
    """Its key, not encrypted; None: it is in the certificate's file. Example: /etc/lanekeeper/client.key"""

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
        """For https; None where nothing is set, and the system's certificates need not be read for it."""
        return None if self.ca_file is None and self.cert_file is None else self.context()

    def context(self) -> ssl.SSLContext:
        """Verifies the other side, by `ca_file` if given, and shows it our certificate, if there is one."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            # An encrypted key would ask for its password on the terminal; a service has none.
            context.load_cert_chain(self.cert_file, self.key_file, password=lambda: "")
        return context


class ReplySettings(Section):
    """Where replies may go, and how many may wait for their queue."""

    allow: Patterns | None = None
    """Where replies may go, as shell patterns. None: everywhere that the contract allows. Example:
    amq.gen-*,lane.reply.*"""
    bound_to_user: bool | None = None
    """Whether replies go to nobody but whoever published: direct reply-to, or `lane.reply.<user_id>`. Then other queues
    are refused, those that the broker named too: nobody can tell whose they are. None: by the profile. Example: true"""
    waiting: Number[int] = Field(default=WAITING, ge=1, le=100_000)
    """Replies that a full queue refused, and that wait in the broker for another try, in one process; a tenth of them
    for one tenant (without `user_id`: for one queue). What comes beyond is not tried again; it stays under its id."""


class ResultSettings(Section):
    """How long results are kept, and how much of them; with them goes what is known of used message ids."""

    keep_s: Number[float] = Field(default=StoreSpec().keep_s, ge=1, le=YEAR_S)
    """How long it is kept how a request ended, and that its id was used."""
    max_bytes: Number[int] = Field(default=StoreSpec().max_bytes, ge=MIB, le=1024 * GIB)
    """What the SQLite file may use; beyond it what ended first goes first. Redis has `maxmemory` for it."""
    answer_bytes: Number[int] = Field(default=ANSWER_BYTES, ge=64 * 1024, le=512 * MIB)
    """The largest answer that is sent and kept. 16 MiB is what RabbitMQ 4 takes as one message; where the broker
    takes less, that counts. A larger answer ends as `answer_too_large`."""


class ControlSettings(Section):
    """Cancellations and questions for results, so that no tenant's flood delays another's."""

    per_tenant_s: Number[float] = Field(default=100, ge=1, le=100_000)
    """Control messages a second of one tenant that a process carries out, and five times as many at once; what is
    above is answered `too_many_control_messages`, as many as these, and the rest is not answered. Each costs up to 1 ms
    of CPU, so that those of one tenant take a tenth of a core; one that is not answered costs 0.1 ms."""
    unseen_per_tenant: Number[int] = Field(default=StoreSpec().unseen_per_tenant, ge=1, le=10_000_000)
    """Cancellations kept for one tenant of ids that no worker has seen; beyond it its oldest goes. 8 MB of the
    store, and as many as critical's intake holds requests."""


class WaitingSettings(Section):
    """What waits in the broker because its publisher asked for more than a minute's delay."""

    per_tenant: Number[int] = Field(default=StoreSpec().waiting_per_tenant, ge=1, le=100_000_000)
    """Requests of one tenant, each begun 16 KiB of a body counted as one (160 MiB on the broker's disks); above
    it they are answered `too_many_waiting`."""
    in_all: Number[int] = Field(default=StoreSpec().waiting_in_all, ge=1, le=1_000_000_000)
    """The same of all tenants together: ten that use all of theirs, 1.6 GiB."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.per_tenant > self.in_all:
            yield Disagreement(
                f"per_tenant ({self.per_tenant}) is above in_all ({self.in_all}); lower it, or raise in_all",
                at=(("per_tenant",), ("in_all",)),
            )


class DeadSettings(Section):
    """Dead letters: what is kept of them, and for how long."""

    max_count: Number[int] = Field(default=DeadSpec().max_count, ge=1, le=1_000_000_000)
    """Dead letters that the broker keeps: more than anybody looks at. The oldest beyond it are exported, or dropped
    where `folder` is not set, with a warning, the event `removed` and a count in `status`; once a minute."""
    max_bytes: Number[int] = Field(default=DeadSpec().max_bytes, ge=MIB, le=1024 * GIB)
    """The same in bytes of their bodies, estimated by the size of the oldest: AMQP does not tell it."""
    keep_s: Number[float] = Field(default=DeadSpec().keep_s, ge=1, le=10 * YEAR_S)
    """How long one is kept: a month, for whoever comes back from leave."""
    folder: Path | None = None
    """Where those that go are written, a file of JSON lines a day that only this user may read. None: they are
    dropped. Example: /var/lib/lanekeeper/dead"""
    invalid_per_hour: Number[float] = Field(default=INVALID_PER_HOUR, ge=1, le=1_000_000_000)
    """Invalid messages of one tenant that a process parks in an hour, each begun 64 KiB counted as one: enough
    to see what is wrong with them, and 64 MiB at most. What is above is answered, and neither parked nor kept
    under its id. Valid requests that failed are always parked."""

    def spec(self) -> DeadSpec:
        return DeadSpec(max_count=self.max_count, max_bytes=self.max_bytes, keep_s=self.keep_s, folder=self.folder)


class RetrySettings(Section):
    """How long to wait between attempts; the defaults are argued in `consumers/retry.py`."""

    base_s: Number[float] = Field(default=RetryPolicy().base_s, gt=0, le=3600)
    """The first pause after an overload; a quarter of it is the floor of all pauses, and the first after any
    other failure."""
    span_s: Number[float] = Field(default=RetryPolicy().span_s, gt=0, le=86_400)
    """What a request's pauses come to together at least: how long an outage its attempts outlast, where the
    deadline leaves room."""
    cap_s: Number[float] = Field(default=RetryPolicy().cap_s, gt=0, le=86_400)
    """The longest pause, up to half as much again at random not counted."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.base_s > self.cap_s:
            yield Disagreement(
                f"base_s ({self.base_s:g}) is above cap_s ({self.cap_s:g})", at=(("base_s",), ("cap_s",))
            )
