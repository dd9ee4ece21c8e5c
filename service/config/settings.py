"""Settings: the only file that reads the environment. What it finds goes down as frozen specs.

    settings = load_settings()            options > environment > .env > TOML > defaults
    settings.lane_specs() -> tuple[LaneSpec, ...]

The sources are read by `service/config/sources.py`, not by pydantic-settings' own: those stop at the first malformed
value, pass over unknown variables, and let `lanes = 4` in a file vanish under a variable of one lane.
"""

import fnmatch
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from consumers.limits.spec import BudgetSpec
from consumers.prices import Prices
from consumers.providers.routes import ProviderModels, RoutesSpec
from consumers.replies.address import ReplyRule
from consumers.retry import RetryPolicy
from consumers.spending import CapsSpec
from consumers.state.spec import SEEN_LATE_S, StoreSpec
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import SettingsError
from service.config import cross_checks as agreement
from service.config import sources, validation
from service.config.budget_sections import (
    FIRST,
    BudgetSettings,
    CapsSettings,
    FairSettings,
    ModelsSettings,
    PricesSettings,
    ProviderSettings,
)
from service.config.masking import mask_url
from service.config.sections import (
    ControlSettings,
    DeadSettings,
    GatewaySettings,
    LaneSettings,
    LanesSettings,
    ReplySettings,
    ResultSettings,
    RetrySettings,
    Section,
    TlsSettings,
    WaitingSettings,
)
from service.config.validation import Disagreement
from service.config.value_types import AmqpUrl, Chances, HttpUrl, Key, Namespace, Number, StoreUrl, UserNames
from topology.codec.bounds import VALUES
from topology.lanes import DEFAULT_LANES, LaneSpec

CONFIG_FILE = Path("lanekeeper.toml")
DOTENV_FILE = Path(".env")
ANTHROPIC_URL = "https://api.anthropic.com"
LATER = {
    ("webhooks",): "the sending of webhooks",
    ("gateway", "keys"): "the HTTP gateway",
}
"""Settings that come with later versions: refused, never ignored."""


class Settings(BaseSettings):
    """Every setting, valid. Its `repr` holds no secret."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
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
    anthropic_api_key: Key | None = None
    """The first provider's key; with `serve --simulate` none is needed. Example: sk-ant-secret"""
    anthropic_base_url: HttpUrl | None = None
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
    otel_endpoint: HttpUrl | None = None
    """Where spans go, over OTLP/HTTP; the SDK reads every other `OTEL_*` itself. None: no traces are sent.
    Example: http://jaeger.example.com:4318"""
    otel_traces_endpoint: HttpUrl | None = None
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
        """Only what is given: `Settings()` is the defaults, whatever the environment holds."""
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

    def price_table(self) -> Prices:
        return self.prices.table()

    def caps_spec(self) -> CapsSpec:
        return self.caps.spec()

    def disagreements(self) -> Iterator[Disagreement]:
        """What is wrong with settings that are each right by themselves."""
        for place, section in _sections(self):
            yield from (each.under(place) for each in section.disagreements())
        yield from agreement.names(self.providers)
        yield from agreement.models(
            lanes=self.lane_specs(),
            routes=self.routes_spec(),
            prices=self.price_table(),
            in_money=self.caps_spec().in_money,
        )
        yield from agreement.limits(lanes=self.lane_specs(), caps=self.budget_spec().accounts)

    def lacks(self) -> Iterator[Disagreement]:
        """What who calls providers needs besides."""
        if any(each.name == FIRST for each in self.routes_spec().providers) and self.api_key is None:
            yield Disagreement(
                "not set; set it, or answer without a provider: lanekeeper serve --simulate",
                at=(("anthropic_api_key",),),
            )
        for name, provider in self.providers.items():
            yield from (each.under(("providers", name)) for each in provider.lacks())

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
        return None if self.management_url is None else self.management_url.get_secret_value()

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
        url = self.anthropic_base_url
        return ANTHROPIC_URL if url is None else url.get_secret_value()

    @property
    def provider(self) -> str:
        """The provider's base URL as it may be shown."""
        return mask_url(self.provider_url)

    @property
    def api_key(self) -> str | None:
        """The provider's key itself; never shown."""
        return None if self.anthropic_api_key is None else self.anthropic_api_key.get_secret_value()

    @property
    def store(self) -> str:
        """The store's URL, for whoever opens it; never shown."""
        if self.store_url is not None:
            return self.store_url.get_secret_value()
        return f"sqlite:///{quote(str(state_folder() / f'{self.namespace}.sqlite'))}"

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
        base, traces = self.otel_endpoint, self.otel_traces_endpoint
        return (
            None if base is None else base.get_secret_value(),
            None if traces is None else traces.get_secret_value(),
        )

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


def state_folder() -> Path:
    """Where this user's programs keep their state (XDG Base Directory Specification)."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the specification says to pass over such a one
        try:
            base = Path.home() / ".local/state"
        except RuntimeError:  # a user without name and home, in a container
            base = Path("/var/lib")
    return base / "lanekeeper"


KNOWN = sources.Known(
    env_names={
        **sources.env_names(Settings),
        ("anthropic_api_key",): "ANTHROPIC_API_KEY",
        ("anthropic_base_url",): "ANTHROPIC_BASE_URL",
        ("otel_endpoint",): "OTEL_EXPORTER_OTLP_ENDPOINT",
        ("otel_traces_endpoint",): "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    },
    later=LATER,
)


def load_settings(
    config: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: Path = DOTENV_FILE,
    for_calls: bool = False,
    **options: Any,
) -> Settings:
    """Read all sources and validate them together.

    `config`: a TOML file that must exist; None: `lanekeeper.toml`, if there. `options`: nested as `Settings` is
    (`lanes={"batch": {"slots": 12}}`), None for what was not given. `for_calls`: providers will be called,
    and so their keys must be there. Raises SettingsError that names everything that is wrong.
    """
    reading = _read(config, os.environ if environ is None else environ, dotenv, options)
    return _made(reading, for_calls=for_calls)


def load_with_sources(config: Path | None = None, **options: Any) -> tuple[Settings, Mapping[sources.Place, str]]:
    """The same, and by its place where each comes from that is no default: `environment`, `option`, a file's name."""
    reading = _read(config, os.environ, DOTENV_FILE, options)
    return _made(reading, for_calls=False), {place: found.source for place, found in reading.found.items()}


def _read(config: Path | None, environ: Mapping[str, str], dotenv: Path, options: Mapping[str, Any]) -> sources.Reading:
    reading = sources.Reading()
    if config is not None or CONFIG_FILE.is_file():
        sources.read_toml(reading, KNOWN, config or CONFIG_FILE)
    sources.read_dotenv(reading, KNOWN, dotenv)
    sources.read_environment(reading, KNOWN, environ)
    sources.read_options(reading, KNOWN, options)
    return reading


def _made(reading: sources.Reading, *, for_calls: bool) -> Settings:
    settings, wrong = validation.validate(Settings, reading, KNOWN)
    disagreements = [*settings.disagreements(), *(settings.lacks() if for_calls else ())]
    problems = [
        *reading.problems,
        *wrong.values(),
        *validation.disagreed(disagreements, reading, KNOWN, wrong=wrong.keys()),
    ]
    if problems:
        raise SettingsError(_told(problems))
    return settings


def _sections(node: BaseModel, place: sources.Place = ()) -> Iterator[tuple[sources.Place, Section]]:
    """All sections, and where they lie."""
    if isinstance(node, Section):
        yield place, node
    for name, value in node:
        if isinstance(value, Section):
            yield from _sections(value, (*place, name))
    if isinstance(node, Settings):
        for name, provider in node.providers.items():
            yield from _sections(provider, ("providers", name))


def _told(problems: list[str]) -> str:
    if len(problems) == 1:
        return f"wrong setting: {problems[0]}"
    return f"{len(problems)} wrong settings:" + "".join(f"\n  {each}" for each in problems)
