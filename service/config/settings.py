"""Settings: every one of them, valid. `service/config/loading.py` reads them; they go down as frozen specs.

load_settings().lane_specs() -> tuple[LaneSpec, ...]
"""

import fnmatch
import re
import ssl
from typing import Final, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from consumers.limits.spec import BudgetSpec
from consumers.providers.routes import ProviderModels, RoutesSpec
from consumers.replies.address import ReplyRule
from consumers.retry import RetryPolicy
from consumers.state.spec import SEEN_LATE_S, StoreSpec
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.contract.names import Names
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
from topology.codec.bounds import VALUES
from topology.lanes import DEFAULT_LANES, LaneSpec

PREFIX: Final = "LANEKEEPER_"
ANTHROPIC_URL: Final = "https://api.anthropic.com"


class Settings(BaseSettings):
    """Every setting, valid. Its `repr` holds no secret."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        enable_decoding=False,  # lists and tables have commas as well: service/config/value_types.py
        # One field of a lane can be set alone: the others keep that lane's defaults.
        nested_model_default_partial_update=True,
    )

    amqp_url: AmqpUrl = SecretStr("amqp://guest:guest@localhost:5672/")
    """The broker; several URLs of one cluster with commas between them. `amqps://` for TLS; other characters in
    user, password and virtual host as %XX. Example: amqps://lanekeeper:secret@rabbit.example.com:5671/prod"""
    management_url: HttpUrl | None = None
    """The management API, by which `topology plan` and `check` see arguments and bindings. None: looked for at
    the AMQP host, port 15672; user and password are the AMQP URL's unless given. Example:
    https://rabbit.example.com:15671"""
    namespace: Namespace = "lane"
    """What every name on the broker begins with: two of them share a virtual host. Example: staging"""
    anthropic_api_key: Key | None = Field(default=None, alias="ANTHROPIC_API_KEY")
    """The first provider's key; with `serve --simulate` none is needed. Example: sk-ant-secret"""
    anthropic_base_url: HttpUrl | None = Field(default=None, alias="ANTHROPIC_BASE_URL")
    """Where the first provider is. None: https://api.anthropic.com. Example: https://gateway.example.com/anthropic"""
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
    """What keeps results, claims and counters: `sqlite:////file`, or `redis://` where several machines share. None: a
    SQLite file in the user's state folder. Example: redis://:secret@redis.example.com:6379/0"""
    results: ResultSettings = ResultSettings()
    control: ControlSettings = ControlSettings()
    waiting: WaitingSettings = WaitingSettings()
    dead: DeadSettings = DeadSettings()
    speakers: UserNames = ()
    """AMQP users that may speak for other tenants (`x-lane-tenant`, cancelling, asking for results): a
    gateway's. Example: gateway"""
    profile: Literal["production"] | None = None
    """`production`: a worker refuses to start with what `lanekeeper check` warns of; docs/production.md has the list.
    None: `check` warns, and what is sent in plain text is logged. Example: production"""
    require_user_id: bool | None = None
    """Whether a request without `user_id` is refused: nobody can tell whose it is, and all of them share one tenant.
    None: with the profile `production` yes, else no. Example: true"""
    failpoints: Chances = {}
    """Where the process dies on purpose, and how probably: for the fault suite (`consumers/failpoints.py`).
    Example: after_store:0.2"""
    json_values: Number[int] = Field(default=VALUES, ge=1000, le=10_000_000)
    """Keys and values that the JSON of a request or an answer may have: 100,000 hold everything up for 50 ms, more
    for longer. A larger request ends as `too_large`, a larger answer as `answer_too_large`."""
    grace_s: Number[float] = Field(default=25, ge=0, le=3600)
    """How long running requests may finish when stopping; below the 30 s after which Kubernetes kills."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console where a person watches, else JSON. Example: json"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of our own events; what libraries say is told from `warning` up. Example: debug"""
    log_content: bool = False
    """Whether prompts and answers may appear in the log. Never in spans or metrics. Example: true"""
    otel_endpoint: HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    """Where spans go, over OTLP/HTTP; the SDK reads every other `OTEL_*` itself. None: no traces are sent.
    Example: http://jaeger.example.com:4318"""
    otel_traces_endpoint: HttpUrl | None = Field(default=None, alias="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    """The whole URL for spans; comes before the other. Example:
    http://jaeger.example.com:4318/v1/traces"""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`Settings()` is the defaults, whatever the environment holds: sources are read by `load_settings` alone."""
        return (init_settings,)

    def budget_spec(self) -> BudgetSpec:
        """How the budgets of all accounts are spent."""
        return self.budget.spec(self.providers)

    def routes_spec(self) -> RoutesSpec:
        """Who is asked for what. The first provider is there where it has a key, where a lane names it, and where there
        is no other."""
        orders = {lane.name: each.providers for lane in DEFAULT_LANES if (each := self._lane(lane)).providers}
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
        found: LaneSettings = getattr(self.lanes, lane.name)
        return found

    def lane_specs(self) -> tuple[LaneSpec, ...]:
        return tuple(self._lane(lane).spec(lane.name) for lane in DEFAULT_LANES)

    def names(self) -> Names:
        return Names(self.namespace)

    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(**self.retry.model_dump())

    def reply_rule(self) -> ReplyRule:
        """Where replies may go."""
        allow = self.reply_to.allow
        return ReplyRule(
            names=self.names(),
            allow=None if allow is None else tuple(re.compile(fnmatch.translate(each)) for each in allow),
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
        """Whether a reply goes to its requester alone."""
        bound = self.reply_to.bound_to_user
        return self.is_production if bound is None else bound

    @property
    def broker_url(self) -> str:
        """The AMQP URL with its password, or several with commas between them, for who connects; never shown."""
        return self.amqp_url.get_secret_value()

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """The same, one by one; they differ in host and port, maybe in user and password."""
        return urls_of(self.broker_url)

    @property
    def broker(self) -> str:
        """The AMQP URL, or all of them, as it may be shown."""
        return ", ".join(mask_url(each) for each in self.broker_urls)

    @property
    def management(self) -> str | None:
        """The management URL with its credentials, if any were given; never shown."""
        return _unmasked(self.management_url)

    @property
    def vhost(self) -> str:
        """The AMQP URL's virtual host."""
        return unquote(urlsplit(self.broker_urls[0]).path[1:]) or "/"

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password of the AMQP URL, the first where there are several."""
        parts = urlsplit(self.broker_urls[0])
        return unquote(parts.username or "guest"), unquote(parts.password or "guest")

    @property
    def provider_url(self) -> str:
        """The provider's base URL, for whoever calls it."""
        return _unmasked(self.anthropic_base_url) or ANTHROPIC_URL

    @property
    def provider(self) -> str:
        """The provider's base URL as it may be shown."""
        return mask_url(self.provider_url)

    @property
    def api_key(self) -> str | None:
        """The provider's key itself; never shown."""
        return _unmasked(self.anthropic_api_key)

    @property
    def store(self) -> str:
        """The store's URL, for whoever opens it; never shown."""
        return _unmasked(self.store_url) or f"sqlite:///{quote(str(state_folder() / f'{self.namespace}.sqlite'))}"

    @property
    def shown_store(self) -> str:
        """The store's URL as it may be shown."""
        return self.store if self.store.startswith("sqlite:") else mask_url(self.store)

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
    def otlp(self) -> tuple[str | None, str | None]:
        """The collector's base URL, and the whole URL for spans, which comes before it."""
        return _unmasked(self.otel_endpoint), _unmasked(self.otel_traces_endpoint)

    def on_broker(self, url: str, *, namespace: str) -> "Settings":
        """The same, on another broker and under other names: a private one, for the demo."""
        return self.model_copy(update={"amqp_url": SecretStr(url), "namespace": namespace})

    def kept_in(self, store_url: str) -> "Settings":
        """The same, with another store."""
        return self.model_copy(update={"store_url": SecretStr(store_url)})

    def answered_by(self, url: str, *, key: str) -> "Settings":
        """The same, with this provider alone: a simulated one."""
        lanes = {lane.name: self._lane(lane).model_copy(update={"providers": None}) for lane in DEFAULT_LANES}
        return self.model_copy(
            update={
                "anthropic_base_url": SecretStr(url),
                "anthropic_api_key": SecretStr(key),
                "providers": {},
                "lanes": self.lanes.model_copy(update=lanes),
            }
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """For the broker; None without TLS."""
        return self.tls.context() if urlsplit(self.broker_urls[0]).scheme == "amqps" else None


def _unmasked(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
