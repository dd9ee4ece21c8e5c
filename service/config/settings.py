"""Declares all settings, whose values `service/config/loading.py` reads. The packages `lanekeeper`, `consumers` and
`topology` do not import `Settings`, but get the values that they need as frozen dataclasses, such as `RetryPolicy`."""

import fnmatch
import re
import ssl
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from consumers.limits.spec import BudgetSpec
from consumers.providers.routes import ProviderModels, RoutesSpec
from consumers.replies.address import ReplyRule
from consumers.retry import RetryPolicy
from consumers.state.spec import SEEN_LATE_S, StoreSpec
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.bodies import MOST_BYTES, BodyStore
from lanekeeper.contract.names import Names
from service.config.bodies_section import BodiesSettings
from service.config.budget_sections import (
    FIRST,
    BudgetSettings,
    CapsSettings,
    FairSettings,
    ModelsSettings,
    PricesSettings,
    ProviderSettings,
)
from service.config.gateway_section import GatewaySettings
from service.config.masking import mask_url
from service.config.sections import (
    ControlSettings,
    DeadSettings,
    LaneSettings,
    LanesSettings,
    ReplySettings,
    ResultSettings,
    RetrySettings,
    TlsSettings,
    WaitingSettings,
)
from service.config.state_folder import state_folder
from service.config.value_types import AmqpUrl, Chances, HttpUrl, Key, Namespace, Number, StoreUrl, UserNames
from topology.codec.bounds import ANSWER_BYTES, VALUES
from topology.lanes import DEFAULT_LANES, LaneSpec

PREFIX: Final = "LANEKEEPER_"
ANTHROPIC_URL: Final = "https://api.anthropic.com"


class Settings(BaseSettings):
    """All settings, validated. Its `repr` contains no secret."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
        # If only some fields of a lane are set, the others keep that lane's defaults.
        nested_model_default_partial_update=True,
    )

    amqp_url: AmqpUrl = SecretStr("amqp://guest:guest@localhost:5672/")
    """The broker's URL, or the URLs of one cluster's nodes, separated by commas. `amqps://` means TLS. Write special
    characters in user, password and virtual host as %XX. Example:
    amqps://lanekeeper:secret@rabbit.example.com:5671/prod"""
    management_url: HttpUrl | None = None
    """The URL of RabbitMQ's management API, from which `lanekeeper topology plan` and `lanekeeper check` read the
    arguments of queues and the bindings. None: port 15672 of the AMQP host is tried. A URL without user and password
    uses those of the AMQP URL. Example: https://rabbit.example.com:15671"""
    namespace: Namespace = "lane"
    """The prefix of all names on the broker, so that installations can share a virtual host. Example: staging"""
    anthropic_api_key: Key | None = Field(default=None, alias="ANTHROPIC_API_KEY")
    """The API key of the provider named `anthropic`. `serve --simulate` needs none. Example: sk-ant-secret"""
    anthropic_base_url: HttpUrl | None = Field(default=None, alias="ANTHROPIC_BASE_URL")
    """The URL of the first provider, which is named `anthropic`. None: https://api.anthropic.com. Example:
    https://gateway.example.com/anthropic"""
    providers: dict[str, ProviderSettings] = {}
    models: ModelsSettings = ModelsSettings()
    prices: PricesSettings = PricesSettings()
    caps: CapsSettings = CapsSettings()
    fair: FairSettings = FairSettings()
    budget: BudgetSettings = BudgetSettings()
    lanes: LanesSettings = LanesSettings()
    gateway: GatewaySettings = GatewaySettings()
    tls: TlsSettings = TlsSettings()
    reply_to: ReplySettings = ReplySettings()
    retry: RetrySettings = RetrySettings()
    store_url: StoreUrl | None = None
    """The URL of the store of results, claims (which worker works on which request) and counters: `sqlite:////file` for
    one machine, `redis://` for several. None: a SQLite file in the user's state folder. Example:
    redis://:secret@redis.example.com:6379/0"""
    results: ResultSettings = ResultSettings()
    bodies: BodiesSettings = BodiesSettings()
    control: ControlSettings = ControlSettings()
    waiting: WaitingSettings = WaitingSettings()
    dead: DeadSettings = DeadSettings()
    speakers: UserNames = ()
    """AMQP users (such as a gateway's) that may publish, cancel and fetch for other tenants. Example: gateway"""
    profile: Literal["production"] | None = None
    """`production`: a worker does not start while `lanekeeper check` finds any of the risks in docs/production.md.
    None: the check only warns of them, and a starting process logs unencrypted connections. Example: production"""
    require_user_id: bool | None = None
    """Whether requests without the AMQP property `user_id` are refused. If they are accepted, they all belong to one
    common tenant. None: true with the profile `production`, else false. Example: true"""
    failpoints: Chances = {}
    """For tests: places (`consumers/failpoints.py`) at which the process kills itself. Example: after_store:0.2"""
    json_values: Number[int] = Field(default=VALUES, ge=1000, le=10_000_000)
    """How many keys and values together the JSON of a request or an answer may have. Parsing 100,000 of them blocks the
    process for 50 ms. If the JSON of a request has more, the request ends with the error `too_large`; if the JSON of
    its answer has more, it ends with `answer_too_large`."""
    grace_s: Number[float] = Field(default=25, ge=0, le=3600)
    """How long running requests may take to finish when the process is stopped; Kubernetes kills it after 30 s."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto`: `console` (readable lines) on a terminal, else `json`. Example: json"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level of our events that is logged; libraries are logged from `warning` on. Example: debug"""
    log_content: bool = False
    """Whether prompts and answers may appear in the log. They never appear in spans or metrics. Example: true"""
    otel_endpoint: HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    """The collector to which spans are sent, over OTLP/HTTP. OpenTelemetry's SDK reads all other `OTEL_*` variables
    itself. None: no spans are sent. Example: http://jaeger.example.com:4318"""
    otel_traces_endpoint: HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    """The complete URL for spans. If set, it is used instead of `OTEL_EXPORTER_OTLP_ENDPOINT`. Example:
    http://jaeger.example.com:4318/v1/traces"""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Make `Settings()` ignore the environment, which only `load_settings` reads, so that it has the default
        values."""
        return (init_settings,)

    def budget_spec(self) -> BudgetSpec:
        """The limits for calls to the providers (their accounts' budgets), and how the lanes share them."""
        return self.budget.spec(self.providers)

    def routes_spec(self) -> RoutesSpec:
        """Which provider is called for which model. The first provider (that of ANTHROPIC_API_KEY) is included if it
        has a key, if a lane names it, or if there is no other."""
        orders = {lane.name: section.providers for lane in DEFAULT_LANES if (section := self._lane(lane)).providers}
        is_wanted = any(FIRST in (names or ()) for names in orders.values())
        first = [ProviderModels(name=FIRST)] if self.api_key or is_wanted or not self.providers else []
        return RoutesSpec(
            providers=(
                *first,
                *(ProviderModels(name=name, models=self.providers[name].models) for name in sorted(self.providers)),
            ),
            lanes={lane: names for lane, names in orders.items() if names},
            lane_models={lane.name: lane.models for lane in self.lane_specs()},
            fallbacks=self.models.fallbacks,
            tenants=self.models.tenants,
        )

    def _lane(self, lane: LaneSpec) -> LaneSettings:
        section: LaneSettings = getattr(self.lanes, lane.name)
        return section

    def lane_specs(self) -> tuple[LaneSpec, ...]:
        return tuple(self._lane(lane).spec(lane.name) for lane in DEFAULT_LANES)

    def names(self) -> Names:
        return Names(self.namespace)

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
        return ", ".join(mask_url(url) for url in self.broker_urls)

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
    def provider_url(self) -> str:
        """The first provider's base URL, with credentials if it has any; it must never be shown."""
        return _unmasked(self.anthropic_base_url) or ANTHROPIC_URL

    @property
    def provider(self) -> str:
        """The first provider's base URL without credentials, for messages and logs."""
        return mask_url(self.provider_url)

    @property
    def api_key(self) -> str | None:
        """The first provider's API key in plain text; it must never be shown. None: it is not set."""
        return _unmasked(self.anthropic_api_key)

    @property
    def store(self) -> str:
        """The store's URL, with its password if it has one; it must never be shown."""
        return _unmasked(self.store_url) or f"sqlite:///{quote(str(state_folder() / f'{self.namespace}.sqlite'))}"

    @property
    def shown_store(self) -> str:
        """The store's URL without its password, for messages and logs."""
        return self.store if self.store.startswith("sqlite:") else mask_url(self.store)

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
            cancelled_s=max(lane.deadline_s for lane in self.lane_specs()) + SEEN_LATE_S,
            unseen_per_tenant=self.control.unseen_per_tenant,
            waiting_per_tenant=self.waiting.per_tenant,
            waiting_in_all=self.waiting.in_all,
        )

    @property
    def traces_url(self) -> str | None:
        """The complete URL to which spans are sent; None: no spans are sent."""
        base = _unmasked(self.otel_endpoint)
        return _unmasked(self.otel_traces_endpoint) or (base and f"{base}/v1/traces")

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context for the broker; None without TLS."""
        return self.tls.context() if urlsplit(self.broker_urls[0]).scheme == "amqps" else None


def _unmasked(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
