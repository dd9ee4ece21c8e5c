"""Settings: which source wins, how wrong values are reported, and what is never shown."""

import re
from pathlib import Path

import pytest

from consumers.state.base import SEEN_LATE_S
from lanekeeper.contract.problems import SettingsError
from service.config.loading import load_settings
from service.config.settings import Settings, simulating
from tests.support.settings import lane, load, wrong

SECRET = "s3cret"


pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("source", ["environment", "file", "option"])
def test_a_lane_with_slots_set_does_not_grow_even_if_they_equal_the_default(source: str) -> None:
    match source:
        case "environment":
            settings = load(env={"LANEKEEPER_LANES__CRITICAL__SLOTS": "16"})
        case "file":
            settings = load("[lanes.critical]\nslots = 16")
        case _:
            settings = load(lanes={"critical": {"slots": 16}})

    critical = lane(settings, "critical")
    assert (critical.slots, critical.most_slots, critical.most_due_slots) == (16, 16, 4)
    assert lane(settings, "batch").most_slots == 32, "nobody said how many"


def test_options_override_environment_overrides_dotenv_overrides_toml() -> None:
    toml = "[lanes.batch]\nslots = 1\nmax_tokens = 1\nmax_attempts = 1\ncall_timeout_s = 1"
    Path(".env").write_text(
        "LANEKEEPER_LANES__BATCH__MAX_TOKENS=2\nLANEKEEPER_LANES__BATCH__MAX_ATTEMPTS=2\nLANEKEEPER_LANES__BATCH__SLOTS=2"
    )
    env = {"LANEKEEPER_LANES__BATCH__MAX_ATTEMPTS": "3", "LANEKEEPER_LANES__BATCH__SLOTS": "3"}

    batch = lane(load(toml, env=env, lanes={"batch": {"slots": 4}}), "batch")

    assert (batch.call_timeout_s, batch.max_tokens, batch.max_attempts, batch.slots) == (1, 2, 3, 4)


def test_variables_of_others_in_dotenv_and_environment_are_ignored() -> None:
    Path(".env").write_text("DATABASE_URL=x\nAWS_REGION=y\n")

    assert load(env={"HOME": "/root", "LANEKEEPERS_FRIEND": "1"}) == Settings()


def test_all_wrong_values_are_reported_with_name_value_and_what_is_allowed() -> None:
    Path(".env").write_text("LANEKEEPER_LOG_FORMAT=xml")

    told = wrong(
        "[gateway]\nport = 70000\n[lanes.normal]\nslots = 1.5\nmodels = [1, 2]\n[tls]\nca_file = '/not/there'",
        env={
            "LANEKEEPER_LANES__CRITICAL__SLOTS": "0",
            "LANEKEEPER_NAMESPACE": "Not A Name",
            "LANEKEEPER_GRACE_S": "nan",
        },
        lanes={"batch": {"deadline_s": "soon"}},
    )

    assert "9 wrong settings:" in told
    assert "LANEKEEPER_LANES__CRITICAL__SLOTS: found '0', allowed is a whole number from 1 to 10000" in told
    assert "LANEKEEPER_LOG_FORMAT in .env: found 'xml', allowed is auto or json or console" in told
    assert "gateway.port in given.toml: found 70000, allowed is a whole number from 0 to 65535" in told
    assert "lanes.normal.slots in given.toml: found 1.5, allowed is a whole number" in told
    assert "lanes.normal.models in given.toml: found [1, 2], allowed is a list of names" in told
    assert "lanes.batch.deadline_s on the command line: found 'soon', allowed is a number above 0" in told
    assert "tls.ca_file in given.toml: found '/not/there', allowed is a file that is there and can be read" in told
    assert "LANEKEEPER_GRACE_S: found 'nan', allowed is a number from 0 to 3600" in told
    assert "LANEKEEPER_NAMESPACE: found 'Not A Name', allowed is a to z" in told


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LANEKEEPER_LANES__CRITICAL__SLOT", "LANEKEEPER_LANES__CRITICAL__SLOTS"),
        ("LANEKEEPER_AMQPURL", "LANEKEEPER_AMQP_URL"),
        ("LANEKEEPER_GATEWAY_PORT", "LANEKEEPER_GATEWAY__PORT"),
        ("LANEKEEPER_NAMESPACES", "LANEKEEPER_NAMESPACE"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_most_similar_name(name: str, meant: str) -> None:
    assert wrong(env={name: "1"}) == f"wrong setting: {name}: no such setting; did you mean {meant}?"


def test_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    address = "10.96.12.7"
    injected = {
        "SERVICE_HOST": address,
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT": f"tcp://{address}:80",
        "PORT_80_TCP": f"tcp://{address}:80",
        "PORT_80_TCP_PROTO": "tcp",
        "PORT_80_TCP_PORT": "80",
        "PORT_80_TCP_ADDR": address,
    }
    services = ("LANEKEEPER", "LANEKEEPER_GATEWAY", "LANEKEEPER_STORE_URL")
    env = {f"{service}_{name}": value for service in services for name, value in injected.items()}

    assert load(env={**env, "LANEKEEPER_GATEWAY__PORT": "9000"}).gateway.port == 9000


def test_an_unknown_toml_key_is_refused_with_the_most_similar_name() -> None:
    assert "namspace in given.toml: no such setting; did you mean namespace?" in wrong("namspace = 'x'")
    assert "lanes.urgent.slots in given.toml: no such lane; a lane is declared by its rank, " in wrong(
        "[lanes.urgent]\nslots = 1"
    )
    assert "lanes.batch.slot in given.toml: no such setting; did you mean lanes.batch.slots?" in wrong(
        "[lanes.batch]\nslot = 1"
    )


def test_a_value_in_place_of_a_table_is_refused_even_if_a_variable_overrides_it() -> None:
    told = wrong("lanes = 4", env={"LANEKEEPER_LANES__CRITICAL__SLOTS": "3"})

    assert told == "wrong setting: lanes in given.toml: found 4, allowed is a table with a table for each name"


def test_by_default_the_store_is_a_file_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    default, hashed = load(namespace="staging").store, re.compile("[0-9a-f]{8}")
    assert hashed.sub("#", default) == "sqlite:////state/lanekeeper/staging-localhost-#.sqlite"

    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/someone")
    assert load().store.startswith("sqlite:////home/someone/.local/state/lanekeeper/lane-localhost-")

    assert load(env={"LANEKEEPER_STORE_URL": "sqlite:///here.sqlite"}).store == "sqlite:///here.sqlite"
    of_sentinels = load(env={"LANEKEEPER_STORE_URL": f"redis+sentinel://:{SECRET}@one:26379,[::1]/main/0"})
    assert of_sentinels.shown_store == "redis+sentinel://***@one:26379,[::1]/main/0"


@pytest.mark.slow
def test_each_broker_has_a_default_store_of_its_own_however_its_url_is_written() -> None:
    def default(url: str) -> str:
        return load(env={"LANEKEEPER_AMQP_URL": url}).store

    one = default("amqp://guest:guest@localhost:5672/")
    same = ["amqp://127.0.0.1", "amqp://app:secret@LOCALHOST/", "amqp://guest@[::1]:5672/%2F"]
    others = [
        "amqp://localhost:5673/", "amqp://localhost/x", "amqp://localhost/staging", "amqp://rabbit.example/",
        "amqps://localhost/",
    ]  # fmt: skip
    assert {default(url) for url in same} == {one}
    assert len({default(url) for url in others} | {one}) == 6
    assert default("amqps://localhost/") == default("amqps://localhost:5671/")
    assert f"/lane-{'a' * 60}-" in default(f"amqp://{'a' * 63}.example/")
    assert default("amqp://a.example/x,amqp://b.example/x") == default("amqp://u:p@b.example/x,amqp://a.example/x")
    assert "/lane-rabbit.example-" in default("amqp://u:secret@Rabbit.example/")


def test_a_user_without_a_home_has_its_store_in_var_lib(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)

    assert load().store.startswith("sqlite:////var/lib/lanekeeper/lane-localhost-")


@pytest.mark.parametrize("said", ["{", "{}", "[", '"gateway"', "gateway, {", '[""]', '[" gateway"]', '{"gateway": 1}'])
def test_a_speaker_with_an_impossible_user_name_is_refused(said: str) -> None:
    told = wrong(env={"LANEKEEPER_SPEAKERS": said})
    assert told.startswith("wrong setting: LANEKEEPER_SPEAKERS: found ")
    assert "separated by commas, or a JSON array" in told


@pytest.mark.parametrize(
    "value", ["after_lunch", "after_store:2", "after_store:-1", "after_store:x", "after_store:nan"]
)
def test_an_unknown_failpoint_is_refused(value: str) -> None:
    assert "before_claim" in wrong(env={"LANEKEEPER_FAILPOINTS": value})


@pytest.mark.parametrize("namespace", ["amq", "amq-x", "x", "x-lane", "Lane", "a.b", "1a", "", "a" * 41, "a b", "ä"])
def test_a_namespace_that_makes_invalid_names_is_refused(namespace: str) -> None:
    assert "namespace" in wrong(f"namespace = {namespace!r}")


def test_several_broker_urls_are_accepted_for_one_cluster() -> None:
    settings = load(env={"LANEKEEPER_AMQP_URL": "amqps://u:a,b@one/main , amqps://v:c@two:5680/main"})
    assert settings.broker_urls == ("amqps://u:a,b@one/main", "amqps://v:c@two:5680/main")
    assert (settings.vhost, settings.credentials) == ("main", ("u", "a,b"))
    assert settings.broker == "amqps://***@one/main, amqps://***@two:5680/main"
    assert settings.ssl_context() is not None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"amqp://u:{SECRET}@one/a,amqp://u:{SECRET}@two/b", "the same virtual host"),
        (f"amqp://u:{SECRET}@one/,amqps://u:{SECRET}@two/", "all amqp:// or all amqps://"),
        (f"amqp://u:{SECRET}@one/,", "a whole URL, amqp://…, after each comma"),
        (f"amqp://u:{SECRET}@one:5672,two:5672/", "a URL such as"),
    ],
)
def test_broker_urls_of_different_clusters_are_refused_without_passwords(url: str, expected: str) -> None:
    told = wrong(env={"LANEKEEPER_AMQP_URL": url})
    assert expected in told
    assert SECRET not in told


@pytest.mark.parametrize(
    ("name", "url"),
    [
        *(
            ("LANEKEEPER_AMQP_URL", url)
            for url in (
                f"amqp://u:{SECRET}@host:99999/",
                f"amqp://u:{SECRET}@host:0/",
                f"amqp://u:{SECRET}@host/a/b",
                f"amqp://u:{SECRET}",
                f"http://u:{SECRET}@host/",
                f"amqp://host/?password={SECRET}",
                f"amqps://u:{SECRET}@host/?no_verify_ssl=1",
                SECRET,
                f"amqp://u:{SECRET}\udcff@host/",
            )
        ),
        ("LANEKEEPER_STORE_URL", f"redis://:{SECRET}@host/first"),
        ("LANEKEEPER_STORE_URL", f"rediss://:{SECRET}@host/0?ssl_cert_reqs=none"),
        ("LANEKEEPER_STORE_URL", f"postgres://u:{SECRET}@host/x"),
        *(
            ("LANEKEEPER_STORE_URL", f"redis+sentinel://:{SECRET}@{rest}")
            for rest in ("host:1", "host:1,/main/0", "host:0/main", "host:1/main/x", "host:1/main/0?x=1", "h:1;h2/main")
        ),
        ("LANEKEEPER_STORE_URL", "sqlite://relative"),
        *(("LANEKEEPER_STORE_URL", f"sqlite:///{file}") for file in ("", "/", "a/", "a?b", "a#b", "a\tb")),
        *(("LANEKEEPER_BODIES__URL", url) for url in ("/bodies", "a::s3://b", "s3://b?c", "s3://b#c", "https://b")),
        ("LANEKEEPER_BODIES__URL", f"s3://u:{SECRET}@b"),
        ("LANEKEEPER_BODIES__ALLOW", f"https://u:{SECRET}@b"),
        *(("LANEKEEPER_GATEWAY__ORIGINS", f"https://{rest}") for rest in ("a/b", "a?b", f"u:{SECRET}@a", "a#b")),
        ("LANEKEEPER_MANAGEMENT_URL", f"http://host/?password={SECRET}"),
        ("LANEKEEPER_STORE_URL", SECRET),
    ],
)
def test_a_wrong_url_is_reported_without_its_password(name: str, url: str) -> None:
    told = wrong(env={name: url})

    assert told.startswith(f"wrong setting: {name}: found ")
    assert SECRET not in told


def test_no_secret_is_in_an_error_or_in_the_repr() -> None:
    env = {
        "ANTHROPIC_API_KEY": f"sk-ant-{SECRET} {SECRET}",
        "LANEKEEPER_MANAGEMENT_URL": f"ftp://u:{SECRET}@host",
        "ANTHROPIC_BASE_URL": f"https//u:{SECRET}@host",
        "LANEKEEPER_LANES__BATCH__MODEL": f"sk-ant-{SECRET} !",
        "LANEKEEPER_STORE_URL": f"redis://:{SECRET}@host/x",
        "LANEKEEPER_TYPO": SECRET,
    }
    assert SECRET not in wrong(env=env)

    settings = load(
        env={
            "ANTHROPIC_API_KEY": f"sk-ant-{SECRET}",
            "LANEKEEPER_AMQP_URL": f"amqp://u:{SECRET}@host:5672/vhost",
            "LANEKEEPER_MANAGEMENT_URL": f"http://u:{SECRET}@host:15672",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://u:{SECRET}@host:4318",
        }
    )
    assert SECRET not in f"{settings!r} {settings} {settings.broker} {settings.provider}"
    assert settings.broker == "amqp://***@host:5672/vhost"
    assert settings.credentials == ("u", SECRET)
    assert settings.api_key == f"sk-ant-{SECRET}"


@pytest.mark.parametrize(
    "env",
    [
        {"LANEKEEPER_LANES": "{"},
        {"LANEKEEPER_LANES": "5", "LANEKEEPER_LANES__BATCH__SLOTS": "1"},
        {"LANEKEEPER_LANES__BATCH__SLOTS__DEEPER": "1"},
        {"LANEKEEPER_LANES__BATCH__MODELS": '{"a": 1}'},
        {"LANEKEEPER_LANES__BATCH__SLOTS": "1" * 5000},
        {"LANEKEEPER_LANES__BATCH__DEADLINE_S": "1e400"},
        {"LANEKEEPER_NAMESPACE": "\udcff"},
        {"LANEKEEPER_": "1"},
    ],
)
def test_malformed_values_are_reported_without_a_traceback(env: dict[str, str]) -> None:
    told = wrong(env=env)

    assert next(iter(env)) in told
    assert len(told) < 400
    told.encode()


@pytest.mark.parametrize("content", [b"x = [", b"\xff", b"a = 1\na = 2"])
def test_a_broken_toml_file_is_reported_by_its_name(content: bytes) -> None:
    Path("broken.toml").write_bytes(content)

    with pytest.raises(SettingsError, match=r"configuration file broken\.toml cannot be read"):
        load_settings(Path("broken.toml"))


def test_a_given_configuration_file_must_exist() -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        load_settings(Path("absent.toml"))


def test_a_dotenv_file_that_is_not_text_is_reported() -> None:
    Path(".env").write_bytes(b"\xff=1")

    assert ".env cannot be read" in wrong()


def test_a_dotenv_file_that_everybody_may_write_is_refused() -> None:
    Path(".env").touch()
    Path(".env").chmod(0o666)

    assert "run: chmod o-w .env" in wrong()


@pytest.mark.parametrize("provider", ["ANTHROPIC", "LANEKEEPER_PROVIDERS__EU_"])
def test_a_dotenv_file_cannot_send_a_key_of_the_environment_to_another_host(provider: str) -> None:
    key = {f"{provider}_API_KEY": "sk-ant-s3cret"}
    Path(".env").write_text(f"{provider}_BASE_URL=https://thief.example/x")
    told = wrong(env=key)
    assert f"{provider}_BASE_URL in .env: https://thief.example/x would get the key {provider}_API_KEY" in told
    assert "s3cret" not in told

    Path(".env").write_text(f"{provider}_BASE_URL=https://proxy.example\n{provider}_API_KEY=sk-ant-theirs")
    load()
    Path(".env").write_text(f"{provider}_BASE_URL=http://127.0.0.1:8080")
    load(env=key)


def test_contradicting_values_are_reported_under_the_names_that_were_set() -> None:
    told = wrong(env={"LANEKEEPER_RETRY__BASE_S": "100"})

    assert told == "wrong setting: LANEKEEPER_RETRY__BASE_S: base_s (100) is above cap_s (60)"


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (
            {"BATCH__BATCHES__ENABLED": "true", "BATCH__BATCHES__LEAST_S": "90000"},
            "(90000) is not below deadline_max_s",
        ),
        ({"NORMAL__BATCHES__ENABLED": "true"}, "(7200) is not below deadline_max_s (3600)"),
    ],
)
def test_batches_in_which_no_request_would_be_put_are_wrong(given: dict[str, str], values: str) -> None:
    told = wrong(env={f"LANEKEEPER_LANES__{name}": value for name, value in given.items()})
    assert all(f"LANEKEEPER_LANES__{name}" in told for name in given)
    assert f"batches.least_s {values}" in told


def test_reply_patterns_must_match_the_whole_name() -> None:
    rule = load(env={"LANEKEEPER_REPLY_TO__ALLOW": "crm.*,orders.replies"}).reply_rule()

    some = ("crm.x", "orders.replies", "orders.replies2", "xcrm.")
    assert [each for each in some if rule.allows(each, user=None)] == ["crm.x", "orders.replies"]
    assert load().reply_rule().allows("xcrm.", user=None)


def test_a_ca_file_without_a_certificate_is_reported() -> None:
    Path("ca.pem").write_text("not a certificate")

    assert "ca_file, cert_file or key_file cannot be used" in wrong(env={"LANEKEEPER_TLS__CA_FILE": "ca.pem"})
    assert "ca_file, cert_file or key_file cannot be used" in wrong(env={"LANEKEEPER_TLS__CERT_FILE": "ca.pem"})
    assert "key_file is given without cert_file" in wrong(env={"LANEKEEPER_TLS__KEY_FILE": "ca.pem"})
    assert load().tls.given_context() is None


def test_while_simulating_the_only_providers_are_named_so_and_have_the_limits_of_the_first() -> None:
    env = {
        "ANTHROPIC_API_KEY": SECRET,
        "LANEKEEPER_BUDGET__REQUESTS_PER_MIN": "60",
        "LANEKEEPER_PROVIDERS__SPARE__API_KEY": SECRET,
        "LANEKEEPER_PROVIDERS__SPARE__BASE_URL": "http://127.0.0.1:1",
        "LANEKEEPER_LANES__BATCH__PROVIDERS": "spare",
    }
    after = simulating(load(env=env), "http://127.0.0.1:1234")

    spec = after.routes_spec()
    assert ([each.name for each in spec.providers], spec.lanes) == (["simulated", "simulated-openai"], {})
    assert after.budget_spec().accounts["simulated"].requests == 60
    assert after.api_key is None


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318/"}, None),
        ({}, None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318/"},
            "http://host:4318/v1/metrics",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:4318/",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://other/m",
            },
            "http://other/m",
        ),
    ],
)
def test_metrics_are_sent_to_the_collector_unless_turned_off(env: dict[str, str], url: str | None) -> None:
    assert load(env=env).metrics_url == url


def test_operators_are_the_brokers_own_user_unless_others_are_named() -> None:
    env = {"LANEKEEPER_AMQP_URL": f"amqp://app:{SECRET}@host/"}
    assert load(env=env).operators == ("app",)
    assert load(env={**env, "LANEKEEPER_CONTROL__OPERATORS": "ops"}).operators == ("ops",)


def test_a_cancellation_of_an_unseen_request_is_kept_past_the_longest_deadline_of_all_lanes() -> None:
    settings = load(env={"LANEKEEPER_LANES__NORMAL__DEADLINE_MAX_S": "1000000"})
    assert settings.store_spec().cancelled_s == 1_000_000 + SEEN_LATE_S


def test_openais_batches_are_no_message_batches() -> None:
    openai = {"LANEKEEPER_PROVIDERS__OAI__KIND": "openai", "LANEKEEPER_PROVIDERS__OAI__API_KEY": SECRET}
    assert not load(env=openai).has_message_batches
    where = "LANEKEEPER_PROVIDERS__OTHER__"
    claude = {f"{where}KIND": "anthropic", f"{where}API_KEY": SECRET, f"{where}BASE_URL": "https://claude.example"}
    assert load(env={**openai, **claude}).has_message_batches
