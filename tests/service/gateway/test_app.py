"""The documents are valid and say what the code checks."""

import asyncio
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from lanekeeper.contract import names as n
from lanekeeper.contract.problems import PROBLEMS, RequestProblem
from service.gateway.access import Access, hash_of
from service.gateway.app import document
from service.gateway.calls import REFUSED_HEADERS
from service.gateway.messages import COUNT_TOKENS, MODEL, MODELS
from service.gateway.server import ENDLESS
from service.page.live import FILES
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import SETTINGS, Alone
from tests.support.settings import load
from topology.codec import bodies
from topology.codec import headers as codec
from topology.delays import MAX_DELAY_MS

pytestmark = pytest.mark.slow

ASYNCAPI_3 = Path(__file__).parents[2] / "support/asyncapi-3.0.0.json"
OPENAPI, ASYNCAPI = document("openapi", SETTINGS), document("asyncapi", SETTINGS)
REQUEST = ASYNCAPI["components"]["messages"]["request"]
HEADERS: dict[str, Any] = REQUEST["headers"]["properties"]
BODY = Draft202012Validator(REQUEST["payload"])
PROBLEM_SCHEMAS = [
    ASYNCAPI["components"]["messages"]["error"]["payload"],
    OPENAPI["components"]["schemas"]["Problem"]["anyOf"][1],
]
EMPTY: dict[str, Any] = {"prompt": "", "messages": [], "system": "", "model": "", "stream": None, "max_tokens": 0}
Json: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-1, 20_000_000) | st.text(max_size=3) | st.just([]) | st.just({})
)


async def got(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        return await answer.json()


async def test_the_documents_are_served_and_valid() -> None:
    async with Alone() as made:
        over_http, over_amqp = [await got(f"{made.url}/{name}.json") for name in ("openapi", "asyncapi")]

    assert (over_http, over_amqp) == (OPENAPI, ASYNCAPI)
    assert [str(each) for each in OpenAPIV31SpecValidator(over_http).iter_errors()] == []
    errors = Draft7Validator(json.loads(ASYNCAPI_3.read_text())).iter_errors(over_amqp)
    assert [f"{'/'.join(map(str, each.absolute_path))}: {each.message[:200]}" for each in errors] == []


def test_the_names_of_another_namespace_and_all_lanes_are_in_the_documents() -> None:
    own = load(namespace="staging", lanes={"vip": {"rank": 5}, "batch": {"enabled": False}})
    over_amqp, over_http = (json.dumps(document(name, own)) for name in ("asyncapi", "openapi"))

    for exchange in ("requests", "control", "dead", "events"):
        assert f'"staging.{exchange}"' in over_amqp
    assert '"lane.' not in over_amqp
    for text in (over_amqp, over_http):
        assert '{"enum": ["vip", "critical", "normal"]}' in text


async def test_every_path_is_in_the_document_and_no_other() -> None:
    served = Alone().routes.handlers().keys() | {("GET", path) for path in ("/healthz", "/readyz", "/metrics")}
    served -= {("GET", f"/{name}") for name in FILES}

    assert {(method.upper(), path) for path, methods in OPENAPI["paths"].items() for method in methods} == served


def test_every_header_that_a_requester_may_set_is_in_the_documents() -> None:
    assert HEADERS.keys() == n.PUBLIC | {n.ANTHROPIC_BETA, n.ANTHROPIC_VERSION} | n.TRACE_CONTEXT
    waited, submitted = (
        {each["name"] for each in OPENAPI["paths"][path]["post"]["parameters"]}
        for path in ("/v1/messages", "/v1/requests")
    )
    assert submitted == HEADERS.keys() - REFUSED_HEADERS.keys() | {n.LANE_NAME, n.TYPE, "Idempotency-Key"}
    assert waited == submitted - {n.TYPE, n.PIPELINE, n.DIALECT}
    openais = {each["name"] for each in OPENAPI["paths"]["/v1/chat/completions"]["post"]["parameters"]}
    assert openais == waited - {n.ANTHROPIC_BETA, n.ANTHROPIC_VERSION}


@given(
    name=st.sampled_from(sorted(n.PUBLIC - {n.AT, n.BODY, n.BODY_SHA256})),
    value=st.integers(-2, 2 * MAX_DELAY_MS)
    | st.booleans()
    | st.sampled_from(["true", "false", "soon", "10", "-1", ""]),
)
def test_a_headers_schema_allows_what_the_codec_accepts(name: str, value: Any) -> None:
    allows = Draft202012Validator(HEADERS[name]).is_valid(value)
    try:
        codec.read({n.DELAY_MS: 1000, n.GROUP: "g", name: value})  # which debouncing and a size need
    except RequestProblem:
        # digits are a number only if they are in its bounds, which a schema for text cannot say
        assert not allows or (isinstance(value, str) and value.isdigit())
    else:
        assert allows


@given(st.dictionaries(st.sampled_from(sorted(EMPTY)), Json | st.just([{"role": "user", "content": "x"}]), max_size=4))
def test_the_bodys_schema_allows_what_the_codec_accepts(said: dict[str, Any]) -> None:
    try:
        bodies.check(said)
    except RequestProblem:
        assert not BODY.is_valid(said)
    else:
        assert BODY.is_valid(said)


@pytest.mark.parametrize("schema", PROBLEM_SCHEMAS)
def test_every_problem_document_fits_the_schema_and_a_mixed_one_does_not(schema: dict[str, Any]) -> None:
    validator = Draft202012Validator(schema)

    assert [set(schema["properties"]["code"]["enum"]), len(schema["oneOf"])] == [PROBLEMS.keys(), len(PROBLEMS)]
    for code in PROBLEMS:
        document = json.loads(RequestProblem(code, "detail").document(request="r", attempts=1))
        validator.validate(document)
        assert not validator.is_valid({**document, "title": "Another"})
        assert not validator.is_valid({**document, "more": 1})


async def refused(made: Alone, status: int, paths: Collection[str] = OPENAPI["paths"]) -> None:
    """Every call that needs a key is answered with this status, as the document says."""
    calls = [(path, *call) for path in paths for call in OPENAPI["paths"][path].items()]
    async with aiohttp.ClientSession() as session:
        for path, method, described in calls:
            if not described["security"]:
                continue
            said = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if method == "post" else None
            async with session.request(method, made.url + re.sub(r"{\w+}", "x", path), json=said) as got:
                assert got.status == status, (method, path)
                assert got.headers["cache-control"] == "no-store"
                ((content_type, content),) = described["responses"][str(status)]["content"].items()
                assert got.content_type == content_type
                schema = {**content["schema"], "components": OPENAPI["components"]}
                Draft202012Validator(schema).validate(await got.json())


async def test_calls_are_refused_on_every_path_as_the_document_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Alone(host="0.0.0.0") as made:
        await refused(made, 403)
    async with Alone() as made:
        await refused(made, 501, paths=(COUNT_TOKENS, MODELS, MODEL))
    async with Alone(keys={hash_of("k"): {"tenant": "crm"}}) as made:
        await refused(made, 401)
        monkeypatch.setattr(Access, "caller", lambda *_: 1 / 0)
        await refused(made, 500)


async def test_made_up_calls_past_the_lanes_are_answered_as_the_document_says() -> None:
    from tests.support.made_up_calls import (
        make_up,
    )  # here, because its import takes as long as all fast tests of this file

    paths = {COUNT_TOKENS, MODELS, MODEL, "/healthz", "/readyz", "/openapi.json", "/asyncapi.json"}
    async with FaultyAPI() as api, Alone(provider=api.base_url) as made:
        assert await asyncio.to_thread(make_up, made.url, paths=paths, examples=15) > len(paths)


async def test_head_is_answered_wherever_get_is_except_where_an_answer_does_not_end() -> None:
    async with Alone() as made, aiohttp.ClientSession() as session:
        gets = [path for method, path in made.routes.handlers() if method == "GET"]
        for path in ("/healthz", *gets):
            async with session.head(made.url + re.sub(r"{\w+}", "x", path)) as answered:
                assert (answered.status == 405) == (path in ENDLESS), path
                assert await answered.read() == b""
