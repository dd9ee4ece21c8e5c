"""Settings: the only file that reads the environment. What it finds goes down as frozen specs.

    settings = load_settings()            options > environment > .env > TOML > defaults
    settings.lane_specs() -> tuple[LaneSpec, ...]

The sources are read by `service/sources.py`, not by pydantic-settings' own: those stop at the first malformed value,
pass over unknown variables, and let `lanes = 4` in a file vanish under a variable of one lane.
"""

import fnmatch
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from consumers.job import ATTEMPT_WITHIN_S
from consumers.limits.spec import DEFAULT_LANES as LANE_BUDGETS
from consumers.limits.spec import BudgetSpec, Caps, LaneBudget
from consumers.prices import AS_OF, Prices
from consumers.providers.routes import ProviderModels, RoutesSpec
from consumers.retry import RetryPolicy
from consumers.spending import Cap, CapsSpec
from consumers.state.spec import StoreSpec
from service import allowed, sources
from service.allowed import (
    AmqpUrl,
    CapTable,
    Chances,
    Day,
    HttpUrl,
    Key,
    ModelLists,
    ModelName,
    ModelNames,
    Namespace,
    Number,
    Patterns,
    PriceTable,
    ReadableFile,
    StoreUrl,
    UserNames,
    Words,
)
from service.masking import mask_url
from topology.broker.urls import urls_of
from topology.contract.problems import SettingsError
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, GIB, MIB, NORMAL, LaneSpec
from topology.names import Names

CONFIG_FILE = Path("lanekeeper.toml")
DOTENV_FILE = Path(".env")
ANTHROPIC_URL = "https://api.anthropic.com"
LATER = {
    ("webhooks",): "the sending of webhooks",
    ("gateway", "keys"): "the HTTP gateway",
}
"""Settings that come with later versions: refused, never ignored."""
YEAR_S = 365 * 86_400
FIRST = "anthropic"
"""The provider of ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL."""
_PROVIDER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_NEEDS = {
    "anthropic": ("api_key", "base_url"),
    "bedrock": ("region",),
    "vertex": ("region", "project"),
    "foundry": ("api_key", "base_url"),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_BY_NAME = {lane.name: lane for lane in DEFAULT_LANES}


class LaneSettings(_Section):
    """One lane; defaults in `topology/lanes.py`."""

    slots: Number[int] = Field(ge=1, le=10_000)
    slots_min: Number[int] | None = Field(default=None, ge=0, le=10_000)
    slots_max: Number[int] | None = Field(default=None, ge=1, le=10_000)
    target_wait_s: Number[float] = Field(gt=0, le=YEAR_S)
    call_timeout_s: Number[float] = Field(gt=0, le=ATTEMPT_WITHIN_S)
    deadline_s: Number[float] = Field(gt=0, le=YEAR_S)
    max_attempts: Number[int] = Field(ge=1, le=100)
    model: ModelName
    max_tokens: Number[int] = Field(ge=1, le=1_000_000)
    models: Words | None = None
    providers: Words | None = None
    """Which it asks, in this order; none: all, the first provider first, then the others by name."""
    max_length: Number[int] = Field(ge=1, le=1_000_000_000)
    max_length_bytes: Number[int] = Field(ge=MIB, le=1024 * GIB)  # at least the largest request

    @model_validator(mode="after")
    def _its_own_model_is_allowed(self) -> "LaneSettings":
        if self.models is not None and self.model not in self.models:
            raise ValueError(f"models leaves out the lane's own model, {self.model}")
        return self

    @model_validator(mode="after")
    def _its_slots_are_in_order(self) -> "LaneSettings":
        wrong = []
        if self.slots_min is not None and self.slots_min > self.slots:
            wrong.append(f"slots_min ({self.slots_min}) is above slots ({self.slots})")
        if self.slots_max is not None and self.slots_max < self.slots:
            wrong.append(f"slots_max ({self.slots_max}) is below slots ({self.slots})")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @classmethod
    def of(cls, spec: LaneSpec) -> "LaneSettings":
        fields = {name: getattr(spec, name) for name in cls.model_fields if name not in ("models", "providers")}
        return cls(**fields, models=None if spec.models is None else tuple(sorted(spec.models)))

    def spec(self, name: str) -> LaneSpec:
        values = self.model_dump(exclude={"providers"})
        if self.slots_max is None and self.slots != _BY_NAME[name].slots:
            values["slots_max"] = self.slots  # who says how many means it
        return LaneSpec(name=name, **{**values, "models": None if self.models is None else frozenset(self.models)})


class LanesSettings(_Section):
    """The three lanes. Fixed fields, so that one value of one lane can be set alone."""

    critical: LaneSettings = LaneSettings.of(CRITICAL)
    normal: LaneSettings = LaneSettings.of(NORMAL)
    batch: LaneSettings = LaneSettings.of(BATCH)


class ProviderSettings(_Section):
    """A provider beside the first, under a name that its author chooses. Credentials of Amazon and Google that are not
    given here are found as their own libraries find them."""

    kind: Literal["anthropic", "bedrock", "vertex", "foundry"] = "anthropic"
    """`anthropic`: anything that answers like Anthropic's API at `base_url`."""
    api_key: Key | None = None
    base_url: HttpUrl | None = None
    region: ModelName | None = None
    project: ModelName | None = None
    models: ModelNames | None = None
    """Its own name for each model that it has; none: all, under Anthropic's names."""
    requests_per_min: Number[float] | None = Field(default=None, gt=0)
    input_tokens_per_min: Number[float] | None = Field(default=None, gt=0)
    output_tokens_per_min: Number[float] | None = Field(default=None, gt=0)
    concurrency: Number[int] | None = Field(default=None, ge=1)
    """What may be used of each of its accounts at most, whatever it allows."""

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> "ProviderSettings":
        needs = _NEEDS[self.kind]
        if missing := [name for name in needs if getattr(self, name) is None]:
            raise ValueError(f"a provider of kind {self.kind} needs {' and '.join(missing)}")
        if idle := [name for name in ("region", "project") if name not in needs and getattr(self, name) is not None]:
            raise ValueError(f"a provider of kind {self.kind} has no {' and no '.join(idle)}")
        return self


class ModelsSettings(_Section):
    """Which model answers where one cannot, and which tenants may use some only."""

    fallbacks: ModelNames = {}
    tenants: ModelLists = {}


class PricesSettings(_Section):
    """What tokens cost, as of a day. `models` adds to the table of `consumers/prices.py`, or changes it."""

    as_of: Day = AS_OF
    models: PriceTable = {}


class CapSettings(_Section):
    """What may be used in a day (UTC)."""

    requests: Number[float] | None = Field(default=None, gt=0)
    tokens: Number[float] | None = Field(default=None, gt=0)
    usd: Number[float] | None = Field(default=None, gt=0)


class LaneBudgetSettings(_Section):
    """What a lane may count on; argued in `consumers/limits/spec.py`."""

    share: Number[float] = Field(ge=0, le=1)
    boost_s: Number[float] | None = Field(default=None, gt=0)

    @classmethod
    def of(cls, lane: str) -> "LaneBudgetSettings":
        return cls(share=LANE_BUDGETS[lane].share, boost_s=LANE_BUDGETS[lane].boost_s)


class LaneBudgetsSettings(_Section):
    """Of each lane."""

    critical: LaneBudgetSettings = LaneBudgetSettings.of(CRITICAL.name)
    normal: LaneBudgetSettings = LaneBudgetSettings.of(NORMAL.name)
    batch: LaneBudgetSettings = LaneBudgetSettings.of(BATCH.name)

    @model_validator(mode="after")
    def _shares_of_a_whole(self) -> "LaneBudgetsSettings":
        total = self.critical.share + self.normal.share + self.batch.share
        if total > 1 + 1e-9:
            raise ValueError(f"the shares are {total:.0%} together, allowed are 100 %")
        return self


class BudgetSettings(_Section):
    """How the providers' budgets are spent. The four limits are of the first provider's accounts; the others have their
    own. What the provider tells in its headers is kept to in any case."""

    lanes: LaneBudgetsSettings = LaneBudgetsSettings()
    requests_per_min: Number[float] | None = Field(default=None, gt=0)
    input_tokens_per_min: Number[float] | None = Field(default=None, gt=0)
    output_tokens_per_min: Number[float] | None = Field(default=None, gt=0)
    concurrency: Number[int] | None = Field(default=None, ge=1)
    burst_s: Number[float] = Field(default=BudgetSpec().burst_s, gt=0, le=60)
    overflow_s: Number[float] = Field(default=BudgetSpec().overflow_s, gt=0, le=3600)


class LaneCapsSettings(_Section):
    """Of each lane."""

    critical: CapSettings = CapSettings()
    normal: CapSettings = CapSettings()
    batch: CapSettings = CapSettings()


class CapsSettings(_Section):
    """Whose day is capped."""

    lanes: LaneCapsSettings = LaneCapsSettings()
    tenants: CapTable = {}


class GatewaySettings(_Section):
    """Where HTTP is served; in this version, health alone. Port 0: any free one."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    port: Number[int] = Field(default=8080, ge=0, le=65_535)


class TlsSettings(_Section):
    """For `amqps://` and the management API over https. The broker's certificate is always verified."""

    ca_file: ReadableFile | None = None
    cert_file: ReadableFile | None = None
    key_file: ReadableFile | None = None

    @model_validator(mode="after")
    def _loads(self) -> "TlsSettings":
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file is given without cert_file")
        try:
            self.given_context()
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"ca_file, cert_file or key_file cannot be used: {error}") from None
        return self

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


class ReplySettings(_Section):
    """Narrows where replies may go: shell patterns (`amq.gen-*`); none: all that the contract allows."""

    allow: Patterns | None = None


class ResultSettings(_Section):
    """How long results are kept, and how much of them; with them goes what is known of used message ids."""

    keep_s: Number[float] = Field(default=StoreSpec().keep_s, ge=1, le=YEAR_S)
    max_bytes: Number[int] = Field(default=StoreSpec().max_bytes, ge=MIB, le=1024 * GIB)


class RetrySettings(_Section):
    """How long to wait between attempts; the defaults are argued in `consumers/retry.py`."""

    base_s: Number[float] = Field(default=RetryPolicy().base_s, gt=0, le=3600)
    cap_s: Number[float] = Field(default=RetryPolicy().cap_s, gt=0, le=86_400)

    @model_validator(mode="after")
    def _base_below_cap(self) -> "RetrySettings":
        if self.base_s > self.cap_s:
            raise ValueError(f"base_s ({self.base_s:g}) is above cap_s ({self.cap_s:g})")
        return self


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
    management_url: HttpUrl | None = None
    namespace: Namespace = "lane"
    anthropic_api_key: Key | None = None
    anthropic_base_url: HttpUrl | None = None
    providers: dict[str, ProviderSettings] = {}
    models: ModelsSettings = ModelsSettings()
    prices: PricesSettings = PricesSettings()
    caps: CapsSettings = CapsSettings()
    budget: BudgetSettings = BudgetSettings()
    lanes: LanesSettings = LanesSettings()
    gateway: GatewaySettings = GatewaySettings()
    tls: TlsSettings = TlsSettings()
    reply_to: ReplySettings = ReplySettings()
    retry: RetrySettings = RetrySettings()
    store_url: StoreUrl | None = None
    """None: a SQLite file in the user's state folder."""
    results: ResultSettings = ResultSettings()
    speakers: UserNames = ()
    """AMQP users that may speak for other tenants (`x-lane-tenant`, cancelling, asking for results): a gateway's."""
    failpoints: Chances = {}
    """Where the process dies on purpose, and how probably: for the fault suite (`consumers/failpoints.py`)."""
    grace_s: Number[float] = Field(default=25, ge=0, le=3600)
    """How long running requests may finish when stopping; below the 30 s after which Kubernetes kills."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console where a person watches, else JSON."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_content: bool = False
    otel_endpoint: HttpUrl | None = None
    """`OTEL_EXPORTER_OTLP_ENDPOINT`; the SDK reads every other OTEL_* itself. None: no traces are sent."""
    otel_traces_endpoint: HttpUrl | None = None
    """`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: the whole URL for spans; comes before the other."""

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

    @field_validator("providers")
    @classmethod
    def _their_names_are_names(cls, value: dict[str, ProviderSettings]) -> dict[str, ProviderSettings]:
        for name in value:
            if name == FIRST:
                raise ValueError(f"the name {FIRST} is taken: by ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL")
            if _PROVIDER_NAME.fullmatch(name) is None:
                raise ValueError(f"{name[:80]!r} is no name: a to z, 0 to 9, _ and -, up to 40, a letter first")
        return value

    def budget_spec(self) -> BudgetSpec:
        """How the budgets of all accounts are spent."""
        each: dict[str, BudgetSettings | ProviderSettings] = {FIRST: self.budget, **self.providers}
        return BudgetSpec(
            lanes={
                lane.name: LaneBudget(
                    share=getattr(self.budget.lanes, lane.name).share,
                    boost_s=getattr(self.budget.lanes, lane.name).boost_s,
                )
                for lane in DEFAULT_LANES
            },
            burst_s=self.budget.burst_s,
            overflow_s=self.budget.overflow_s,
            accounts={
                name: Caps(
                    requests=given.requests_per_min,
                    input_tokens=given.input_tokens_per_min,
                    output_tokens=given.output_tokens_per_min,
                    concurrency=given.concurrency,
                )
                for name, given in each.items()
            },
        )

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
        return Prices(self.prices.models, as_of=self.prices.as_of)

    def caps_spec(self) -> CapsSpec:
        lanes = {name: Cap(**cap) for name, cap in self.caps.lanes.model_dump().items()}
        return CapsSpec(lanes=lanes, tenants=self.caps.tenants)

    def disagreements(self) -> list[str]:
        """What is wrong with settings that are each right by themselves."""
        lanes, prices = self.lane_specs(), self.price_table()
        used = {model for lane in lanes for model in (lane.model, *(lane.models or ()))}
        problems = self.routes_spec().problems(known=prices.models | used)
        if self.caps_spec().in_money:
            problems += [
                f"prices.models: {model!r} has no price, and what is spent is capped in dollars"
                for model in sorted(used)
                if prices.of(model) is None
            ]
        return problems

    def _lane(self, lane: LaneSpec) -> LaneSettings:
        found: LaneSettings = getattr(self.lanes, lane.name)
        return found

    def lane_specs(self) -> tuple[LaneSpec, ...]:
        return tuple(self._lane(lane).spec(lane.name) for lane in DEFAULT_LANES)

    def names(self) -> Names:
        return Names(self.namespace)

    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(base_s=self.retry.base_s, cap_s=self.retry.cap_s)

    def reply_patterns(self) -> tuple[re.Pattern[str], ...] | None:
        allow = self.reply_to.allow
        return None if allow is None else tuple(re.compile(fnmatch.translate(each)) for each in allow)

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
        return StoreSpec(keep_s=self.results.keep_s, max_bytes=self.results.max_bytes)

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
    **options: Any,
) -> Settings:
    """Read all sources and validate them together.

    `config`: a TOML file that must exist; None: `lanekeeper.toml`, if there. `options`: nested as `Settings` is
    (`lanes={"batch": {"slots": 12}}`), None for what was not given. Raises SettingsError that names every wrong value.
    """
    reading = sources.Reading()
    if config is not None or CONFIG_FILE.is_file():
        sources.read_toml(reading, KNOWN, config or CONFIG_FILE)
    sources.read_dotenv(reading, KNOWN, dotenv)
    sources.read_environment(reading, KNOWN, os.environ if environ is None else environ)
    sources.read_options(reading, KNOWN, options)
    settings, problems = allowed.validate(Settings, reading, KNOWN)
    problems = [*reading.problems, *problems, *(settings.disagreements() if settings is not None else ())]
    if settings is None or problems:
        raise SettingsError(_told(problems))
    return settings


def _told(problems: list[str]) -> str:
    if len(problems) == 1:
        return f"wrong setting: {problems[0]}"
    return f"{len(problems)} wrong settings:" + "".join(f"\n  {each}" for each in problems)
