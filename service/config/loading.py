"""Loads the settings; the only file that reads the environment.

    load_settings()            options > environment > .env > TOML > defaults

A setting in several of these sources gets its value from the leftmost one. All sources are read into one table, so that
names that no setting has are noticed, and all errors are reported at once, as the user wrote them.
"""

import os
import stat
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import annotated_types
from dotenv import dotenv_values
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lanekeeper.contract.identity import urls_of
from lanekeeper.contract.problems import SettingsError
from service.config.flows import THE_MODEL, wrong_names, wrong_references
from service.config.settings import (
    ANTHROPIC_URL,
    FIRST,
    MOST_RANK,
    PREFIX,
    BatchesSettings,
    LimitsSettings,
    ProviderSettings,
    Settings,
)
from service.config.value_types import ALLOWED, Disagreement, Section, mask, mask_url
from service.telemetry import redaction
from topology.lanes import DEFAULT_LANES, MOST_LANES, NAME, RESERVED

Place = tuple[str, ...]
"""The path of a setting in the nested settings, such as ("lanes", "critical", "slots")."""
ANY: Final = "*"
"""In a setting's path, this stands for a name that the user chooses, such as the name of a provider: ("providers", "*",
"kind")."""


def is_section(kind: object) -> bool:
    """Whether a field's type is a group of settings (a pydantic model), not a single setting."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def declared(kind: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, FieldInfo]]:
    """Each setting of a group, and of the groups in it, with its path."""
    for name, info in kind.model_fields.items():
        here = (*place, name)
        if get_origin(info.annotation) is dict and is_section(inside := get_args(info.annotation)[1]):
            yield from declared(inside, (*here, ANY))
        elif is_section(info.annotation):
            yield from declared(info.annotation, here)  # type: ignore[arg-type]
        else:
            yield here, info


SETTINGS: Final[Mapping[Place, FieldInfo]] = dict(declared(Settings))
_GROUPS: Final = frozenset(place[:depth] for place in SETTINGS for depth in range(1, len(place)))
_ALIASES: Final = {info.alias: name for name, info in Settings.model_fields.items() if info.alias}
"""For each environment variable without the prefix `LANEKEEPER_`, such as ANTHROPIC_API_KEY: the field of `Settings`
that it sets."""


def pattern(place: Place) -> Place:
    """The key in `SETTINGS`: ("providers", "*", "kind") for ("providers", "eu", "kind")."""
    return tuple(ANY if (*place[:depth], ANY) in _GROUPS else step for depth, step in enumerate(place))


def _is_setting(place: Place) -> bool:
    return pattern(place) in SETTINGS


def _is_group(place: Place) -> bool:
    return pattern(place) in _GROUPS


def variable(place: Place) -> str:
    """The environment variable: `LANEKEEPER_LANES__BATCH__SLOTS` for ("lanes", "batch", "slots")."""
    return SETTINGS[pattern(place)].alias or PREFIX + "__".join(place).upper().replace("-", "_")


def _place_of(name: str) -> Place | None:
    place = (_ALIASES[name],) if name in _ALIASES else _as_place(name)
    return place if _is_setting(place) and variable(place) == name else None


def _as_place(name: str) -> Place:
    place = tuple(name.upper().removeprefix(PREFIX).lower().split("__"))
    # the name of a lane may contain -, that of an environment variable may not
    return tuple(
        step.replace("_", "-") if depth and place[depth - 1] == "lanes" else step for depth, step in enumerate(place)
    )


def _unknown_variable(name: str) -> str:
    place = _as_place(name)
    if _is_group(place):
        inside = next(setting[len(place) :] for setting in SETTINGS if setting[: len(place)] == pattern(place))
        return f"is a group of settings; set one of them, such as {variable((*place, *inside))}"
    candidates = [
        tuple(place[depth] if step == ANY else step for depth, step in enumerate(setting))
        for setting in SETTINGS
        if ANY not in setting[len(place) :]
    ]
    return _no_setting(
        name.upper().removeprefix(PREFIX), {known.removeprefix(PREFIX): known for known in map(variable, candidates)}
    )


def _unknown_key(place: Place, value: Any) -> str:
    if _is_group(place):
        inside = ", ".join(_inside(place)).replace(ANY, "a table for each name")
        return f"found {mask(value)}, allowed is a table with {inside}"
    return _no_setting(place[-1], {key: key for key in _inside(place[:-1])})


def _no_setting(name: str, known: Mapping[str, str]) -> str:
    near = get_close_matches(name, known, cutoff=0.7)
    return "no such setting" + (f"; did you mean {known[near[0]]}?" if near else "")


def _inside(place: Place) -> list[str]:
    at = pattern(place)
    return list(dict.fromkeys(setting[len(at)] for setting in SETTINGS if setting[: len(at)] == at))


@dataclass(frozen=True, slots=True)
class _Found:
    value: Any
    name: str
    """As the user wrote it, such as "LANEKEEPER_NAMESPACE in .env"."""
    source: str


def _of_values(error: ValidationError, found: Mapping[Place, _Found]) -> dict[Place, str]:
    lines: dict[Place, str] = {}
    for details in error.errors():
        first, *rest = map(str, details["loc"])
        location = (_ALIASES.get(first, first), *rest)
        # pydantic's location may be longer than the setting's path, because it may name an item of a list.
        for place in (location[:n] for n in range(1, len(location) + 1)):
            if place in found:
                lines[place] = _line(place, details, found[place])
    return lines


def _of_disagreements(
    disagreements: Iterable[Disagreement], found: Mapping[Place, _Found], *, wrong: Collection[Place]
) -> list[str]:
    return [
        redaction.text(f"{_names(disagreement.at, found)}: {disagreement.text}")  # a key may stand where a name belongs
        for disagreement in disagreements
        if not any(_overlap(place, other) for place in (*disagreement.at, *disagreement.by) for other in wrong)
    ]


def _overlap(one: Place, other: Place) -> bool:
    return all(ANY in (x, y) or x == y for x, y in zip(one, other, strict=False))


def _names(places: tuple[Place, ...], found: Mapping[Place, _Found]) -> str:
    """As the user wrote them; if none was set, the first, in the notation of its neighbours."""
    given = [value.name for at in places for place, value in found.items() if place[: len(at)] == at]
    if given:
        return ", ".join(dict.fromkeys(given))
    first = places[0]
    for near, value in found.items():
        if near[:-1] == first[:-1] and value.name.startswith(".".join(near)):
            return ".".join(first) + value.name.removeprefix(".".join(near))
    return variable(first)


def _line(place: Place, error: ErrorDetails, found: _Found) -> str:
    field = SETTINGS[pattern(place)]
    what = error["ctx"]["what"] if error["type"] == ALLOWED else allowed_values(field)
    return f"{found.name}: found {_shown(field, found.value)}, allowed is {what}"


def _types(field: FieldInfo) -> Iterator[Any]:
    todo: list[Any] = [field.annotation]
    while todo:
        kind = todo.pop(0)
        if kind is not type(None):
            yield kind
            if get_origin(kind) is not Literal:
                todo.extend(get_args(kind))


def _shown(field: FieldInfo, value: Any) -> str:
    if SecretStr not in _types(field):
        return mask(value)
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    return "(hidden)"


def allowed_values(field: FieldInfo) -> str:
    """The values that a setting allows, in words for an error message, such as `a whole number from 1`."""
    types = list(_types(field))
    for kind in types:
        if get_origin(kind) is Literal:
            return " or ".join(get_args(kind))
    if bool in types:
        return "true or false"
    if int in types or float in types:
        return ("a whole number" if int in types else "a number") + _limits(field)
    if SecretStr in types or str in types:
        return "text" if tuple not in {get_origin(kind) for kind in types} else "a list of names"
    return "a file that is there and can be read"


def _limits(field: FieldInfo) -> str:
    text = ""
    for constraint in field.metadata:
        match constraint:
            case annotated_types.Ge(ge=low):
                text += f" from {low}"
            case annotated_types.Gt(gt=low):
                text += f" above {low}"
            case annotated_types.Le(le=high):
                text += f" to {high}" if " from " in text else f", at most {high}"
    return text


_NAMING_MODELS = (("prices", "models"), ("providers", ANY, "models"), ("lanes", ANY, "model"), ("lanes", ANY, "models"))
"""The settings that name models. Whether a model is known depends on all of them together."""


def _contradictions(settings: Settings) -> Iterator[Disagreement]:
    for place, section in _sections(settings):
        yield from (disagreement.under(place) for disagreement in section.disagreements())
    yield from _lanes(settings)
    yield from _speakers(settings)
    yield from wrong_names("providers", settings.providers, taken={FIRST: "ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL"})
    yield from wrong_names("handlers", settings.handlers, taken={THE_MODEL: "the model"})
    yield from wrong_names("pipelines", settings.pipelines)
    yield from wrong_names("schedules", settings.schedules)
    lanes = {lane.name: lane for lane in settings.lane_specs()}
    yield from wrong_references(settings.pipelines, handlers=settings.handlers, lanes=lanes)
    for name, schedule in settings.schedules.items():
        yield from schedule.wrong(
            name,
            lanes,
            handlers=settings.handlers,
            pipelines=settings.pipelines,
            webhooks=settings.webhooks.spec(),
            tenant=settings.credentials[0] if settings.needs_user_id else "",
        )
    yield from _models(settings)
    yield from _output_limits(settings)


def _missing_for_calls(settings: Settings) -> Iterator[Disagreement]:
    if any(provider.name == FIRST for provider in settings.routes_spec().providers) and settings.api_key is None:
        yield Disagreement(
            "not set; set it, or answer without a provider: lanekeeper serve --simulate", at=(("anthropic_api_key",),)
        )
    for name, provider in settings.providers.items():
        yield from (disagreement.under(("providers", name)) for disagreement in provider.missing_for_calls())


def _sections(node: BaseModel, place: Place = ()) -> Iterator[tuple[Place, Section]]:
    if isinstance(node, Section):
        yield place, node
    for name, value in node:
        if isinstance(value, Section):
            yield from _sections(value, (*place, name))
        elif isinstance(value, dict):
            for key, section in value.items():
                if isinstance(section, Section):
                    yield from _sections(section, (*place, name, key))


def _lanes(settings: Settings) -> Iterator[Disagreement]:
    lanes = settings.lane_specs()
    at = {lane.name: ("lanes", lane.name) for lane in lanes}
    if not lanes or len(lanes) > MOST_LANES:
        yield Disagreement(f"{len(lanes)} lanes are enabled, allowed are 1 to {MOST_LANES}", at=(("lanes",),))
    for lane, after in pairwise(lanes):
        if lane.rank == after.rank:
            yield Disagreement(
                f"the lanes {lane.name} and {after.name} have one rank, {lane.rank}; give each its own",
                at=tuple((*at[each.name], "rank") for each in (lane, after)),
            )
    for name in settings.lanes.keys() - {lane.name for lane in DEFAULT_LANES}:
        if NAME.fullmatch(name) is None or name in RESERVED:
            yield Disagreement(
                f"{name[:80]!r} is no name for a lane: a to z, 0 to 9 and -, up to 32, a letter first, and none of "
                f"{', '.join(sorted(RESERVED))}",
                at=(("lanes", name),),
            )
    there = f"there are {', '.join(at)}"
    for group, table in (("budget", settings.budget.lanes), ("caps", settings.caps.lanes)):
        for name in table.keys() - settings.lanes.keys():
            yield Disagreement(
                f"no lane {name[:80]!r}; {there}", at=((group, "lanes", name),), by=(("lanes", name, "rank"),)
            )
    for key in settings.gateway.keys.values():
        for name in key.lanes or ():
            if name not in at:
                text = f"the key of {key.tenant} names the lane {name[:80]!r}; {there}"
                yield Disagreement(text, at=(("gateway", "keys"),), by=(("lanes", name),))
        for name in key.pipelines:
            if name not in settings.pipelines:
                text = f"the key of {key.tenant} names the pipeline {name[:80]!r}, which is not declared"
                yield Disagreement(text, at=(("gateway", "keys"),), by=(("pipelines", name),))
    shares = settings.budget_spec().shares
    if (total := sum(shares.values())) > 1 + 1e-9:
        listed = ", ".join(f"{lane} {share * 100:.4g} %" for lane, share in shares.items())
        yield Disagreement(
            f"the shares are {total * 100:.4g} % together ({listed}), allowed are 100 %",
            at=tuple(("budget", "lanes", lane, "share") for lane in shares),
        )


def _speakers(settings: Settings) -> Iterator[Disagreement]:
    user = settings.credentials[0]
    acts_for_others = any(key.tenant not in (None, user) for key in settings.gateway.keys.values())
    if acts_for_others and user not in settings.speakers:
        yield Disagreement(
            f"has keys of other tenants than the broker's user {user!r}, who is not in LANEKEEPER_SPEAKERS: "
            "add it there, for the workers too",
            at=(("gateway", "keys"),),
            by=(("speakers",), ("amqp_url",)),
        )


def _models(settings: Settings) -> Iterator[Disagreement]:
    routes, prices, in_money = settings.routes_spec(), settings.prices.table(), settings.caps.spec().in_money
    for lane in settings.lane_specs() if in_money else ():
        for model in sorted({lane.model, *(lane.models or ())}):
            if not prices.has(model):
                text = f"{model!r} has no price, and what is spent is capped in dollars; give it one in prices.models"
                at = (("lanes", lane.name, "model" if model == lane.model else "models"),)
                yield Disagreement(f"{text} (LANEKEEPER_PRICES__MODELS)", at=at, by=(*_NAMING_MODELS, ("caps",)))
    for circle in routes.circles():
        yield Disagreement(circle, at=(("models", "fallbacks"),))
    for problem in routes.problems():
        yield Disagreement(problem.text, at=(problem.place,), by=_NAMING_MODELS)


def _output_limits(settings: Settings) -> Iterator[Disagreement]:
    lanes = settings.lane_specs()
    if not lanes:
        return
    longest = max(lanes, key=lambda lane: lane.max_tokens)
    for provider, cap in settings.budget_spec().accounts.items():
        if cap.output_tokens is not None and cap.output_tokens < longest.max_tokens:
            section = ("budget",) if provider == FIRST else ("providers", provider)
            yield Disagreement(
                f"{cap.output_tokens:g} is less than one answer of lane {longest.name} may have "
                f"({longest.max_tokens} tokens); allow more, or lower the lane's MAX_TOKENS",
                at=((*section, "output_tokens_per_min"),),
                by=(("lanes", longest.name, "max_tokens"),),
            )


DEFAULT = "default"
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting with its value in effect, and the source of this value: a row of `lanekeeper settings`."""

    name: str
    """The setting's name in a TOML file and for `--set`, such as `lanes.batch.slots`."""
    variable: str
    value: Any
    source: str


def effective(settings: Settings, found: Mapping[Place, str]) -> Iterator[Effective]:
    """All settings with the values in effect. `found`: the source of each that a source has set."""
    for pattern in SETTINGS:
        for place in _places(settings, pattern):
            yield Effective(".".join(place), variable(place), shown(settings, place), found.get(place, DEFAULT))


def _places(settings: Settings, pattern: Place) -> Iterator[Place]:
    if ANY not in pattern:
        yield pattern
        return
    at = pattern.index(ANY)
    table: Any = settings
    for part in ("lanes",) if pattern[at - 1] == "lanes" else pattern[:at]:
        table = getattr(table, part)
    for name in table:
        yield (*pattern[:at], name, *pattern[at + 1 :])


def shown(settings: Settings, place: Place) -> Any:
    """A setting's value in effect, as JSON, without secrets."""
    match place:
        case ("store_url",):
            return settings.shown_store
        case ("budget", "lanes", lane, "share"):
            return settings.budget_spec().shares.get(lane)
    node: Any = settings
    for step in place:
        node = node.get(step) if isinstance(node, Mapping) else getattr(node, step, None)
    return plain(node)


def plain(value: Any) -> Any:
    """A value as JSON, without secrets."""
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        return ", ".join(mask_url(url) for url in urls_of(text)) if "://" in text else HIDDEN
    if is_dataclass(value) and not isinstance(value, type):
        return {name: entry for name, entry in asdict(value).items() if entry is not None}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


SIMULATED = "simulated"


def with_broker(settings: Settings, url: str, *, namespace: str, store_url: str) -> Settings:
    """A copy of the settings with another broker, namespace and store."""
    update = {"amqp_url": SecretStr(url), "namespace": namespace, "store_url": SecretStr(store_url)}
    return settings.model_copy(update=update)


def simulating(settings: Settings, *urls: str) -> Settings:
    """A copy in which all lanes use only the simulated APIs at `urls`, with the limits of the first provider."""
    limits = {name: getattr(settings.budget, name) for name in LimitsSettings.model_fields}
    providers = {
        f"{SIMULATED}-{number}" if number > 1 else SIMULATED: ProviderSettings.model_validate(
            {"base_url": url, "api_key": SIMULATED, **limits}
        )
        for number, url in enumerate(urls, start=1)
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


CONFIG_FILE = Path("lanekeeper.toml")
DOTENV_FILE = Path(".env")
_OWN_HOSTS = {urlsplit(ANTHROPIC_URL).hostname, "localhost", "127.0.0.1", "::1"}


def load_settings(
    config: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: Path = DOTENV_FILE,
    for_calls: bool = False,
    **options: Any,
) -> Settings:
    """Read all sources and validate them together.

    `config`: a TOML file that must exist; None: `lanekeeper.toml` is read if it exists. `options`: nested as `Settings`
    is (`lanes={"batch": {"slots": 12}}`), with None for options that were not given. `for_calls`: whether the process
    will call providers, so that their keys must be set. Raises SettingsError, which names everything that is wrong.
    """
    return _read(config, os.environ if environ is None else environ, dotenv, options).settings(for_calls=for_calls)


def load_with_sources(config: Path | None = None, **options: Any) -> tuple[Settings, Mapping[Place, str]]:
    """The settings, and for each that is set its source: `environment`, `option`, or a file. Raises SettingsError."""
    given = _read(config, os.environ, DOTENV_FILE, options)
    return given.settings(for_calls=False), {place: found.source for place, found in given.found.items()}


T = TypeVar("T")


class Changed(Generic[T]):
    """Reads a part of the settings again when a file that settings come from has changed. `part` takes it from all
    settings; the other arguments are those of `load_settings`. Make it before the settings are loaded, so that no
    change is missed."""

    def __init__(self, part: Callable[[Settings], T], config: Path | None = None, **options: Any) -> None:
        self._part = part
        self._config = config
        self._options = options
        self._files = (config or CONFIG_FILE, DOTENV_FILE)
        self._seen = self._state()

    def __call__(self) -> T | None:
        """The part; None if no file has changed since the last call. Raises SettingsError."""
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        return self._part(load_settings(self._config, **self._options))

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_state_of(file) for file in self._files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(config: Path | None, environ: Mapping[str, str], dotenv: Path, options: Mapping[str, Any]) -> "_Given":
    given = _Given()
    if config is not None or CONFIG_FILE.is_file():
        file = config or CONFIG_FILE
        given.add(_toml(file), source=str(file), where=f" in {file}")
    if dotenv.is_file():
        given.add_variables(_dotenv(dotenv), source=str(dotenv), where=f" in {dotenv}")
    given.add_variables(environ, source="environment")
    given.add(options, source="option", where=" on the command line")
    return given


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"configuration file {path} cannot be read: {error}") from None


def _dotenv(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            raise SettingsError(f"{path} can be written by every user of this machine; run: chmod o-w {path}")
        return {name: value or "" for name, value in dotenv_values(path, encoding="utf-8").items()}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


@dataclass(slots=True)
class _Given:
    found: dict[Place, _Found] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, values: Mapping[str, Any], *, source: str, where: str, group: Place = ()) -> None:
        """`where`: ends the names in error messages, such as " in .env". `group`: to which the values belong."""
        for key, value in values.items():
            place = (*group, key)
            name = ".".join(place) + where
            if value is None:
                continue
            if _is_setting(place):
                self.found[place] = _Found(value, name, source)
            elif _is_group(place) and isinstance(value, Mapping):
                self.add(value, source=source, where=where, group=place)
            else:
                self.problems.append(f"{name}: {_unknown_key(place, value)}")

    def add_variables(self, variables: Mapping[str, str], *, source: str, where: str = "") -> None:
        """An empty variable is not set: Docker Compose passes one for `${NAME:-}`."""
        for name, value in variables.items():
            if (place := _place_of(name)) is None:
                if name.upper().startswith(PREFIX):
                    self.problems.append(f"{name}{where}: {_unknown_variable(name)}")
            elif value.strip():
                self.found[place] = _Found(value, name + where, source)

    def settings(self, *, for_calls: bool) -> Settings:
        settings, wrong = self._validated()
        disagreements = [
            *_contradictions(settings),
            *(_missing_for_calls(settings) if for_calls else ()),
        ]
        lines = [
            *self.problems,
            *wrong.values(),
            *_of_disagreements([*self._undeclared_lanes(), *disagreements], self.found, wrong=wrong.keys()),
            *self._keys_sent_elsewhere(),
        ]
        if lines:
            count = "wrong setting: " if len(lines) == 1 else f"{len(lines)} wrong settings:\n  "
            raise SettingsError(count + "\n  ".join(lines))
        return settings

    def _undeclared_lanes(self) -> Iterator[Disagreement]:
        known = [lane.name for lane in DEFAULT_LANES]
        known += [place[1] for place in self.found if place[0] == "lanes" and place[2] == "rank"]
        for name in dict.fromkeys(place[1] for place in self.found if place[0] == "lanes"):
            if name not in known:
                near = get_close_matches(name, known)
                meant = f", did you mean {near[0]}?" if near else ";"
                yield Disagreement(
                    f"no such lane{meant} a lane is declared by its rank, {variable(('lanes', name, 'rank'))}",
                    at=(("lanes", name),),
                )

    def _keys_sent_elsewhere(self) -> Iterator[str]:
        """The `.env` of whatever folder a command is run in may not say where a key that another source has set is
        sent."""
        for place, address in self.found.items():
            key = self.found.get((*place[:-1], place[-1].replace("base_url", "api_key")))
            if not place[-1].endswith("base_url") or key is None or key.source == address.source:
                continue
            text = str(address.value).strip()
            if address.source == str(DOTENV_FILE) and urlsplit(text).hostname not in _OWN_HOSTS:
                yield (
                    f"{address.name}: {mask_url(text)} would get the key {key.name} of another source; "
                    "if that is meant, set both in the same place"
                )

    def _validated(self) -> tuple[Settings, dict[Place, str]]:
        wrong: dict[Place, str] = {}
        while True:
            try:
                return Settings(**self._nested(omitted=wrong)), wrong
            except ValidationError as error:
                lines = _of_values(error, self.found)
                if not lines.keys() - wrong.keys():  # no further value to leave out: the loop would not end
                    raise
                wrong |= lines

    def _nested(self, *, omitted: Collection[Place]) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for place, found in self.found.items():
            group = nested
            for step in place[:-1]:
                group = group.setdefault(step, {})
            if place not in omitted:
                group[place[-1]] = found.value
        own = nested.get("lanes", {}).keys() - {lane.name for lane in DEFAULT_LANES}
        for number, name in enumerate(own):  # with a rank, what else is wrong of a lane is found too
            nested["lanes"][name].setdefault("rank", MOST_RANK - number)
        return nested
