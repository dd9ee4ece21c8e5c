"""`/openapi.json` and `/asyncapi.json` are valid documents, and say what the code checks."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import SecretStr

from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS, RequestProblem
from service.config.copies import with_provider
from service.config.gateway_section import LANES, GatewaySettings
from service.config.settings import Settings
from service.gateway.app import Gateway, client_for
from service.gateway.call_reader import REFUSED_HEADERS
from service.gateway.described.asyncapi import asyncapi
from service.gateway.described.openapi import openapi
from service.gateway.described.schemas import problem
from service.gateway.lookups import COUNT_TOKENS, MODEL, MODELS
from service.gateway.server import Server
from service.simulated.app import SimulatedAPI
from tests.support.gate import opened
from topology.codec import body as bodies
from topology.codec import headers as codec
from topology.codec import schemas
from topology.delays import MAX_DELAY_MS

ASYNCAPI_3 = Path(__file__).parents[2] / "support/asyncapi-3.0.0.json"
NAMES = Names(namespace="lane")
EMPTY: dict[str, Any] = {"prompt": "", "messages": [], "system": "", "model": "", "stream": None, "max_tokens": 0}
Json: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-1, 20_000_000) | st.text(max_size=3) | st.just([]) | st.just({})
)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"), gateway=GatewaySettings(port=0))
    routes = Gateway(settings, client_for(settings), opened(settings))
    async with Server(routes.reasons, host="127.0.0.1", port=0, routes=routes) as made:
        yield made


async def got(server: Server, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(server.url + path) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        return await answer.json()


@pytest.mark.slow
async def test_the_openapi_document_is_served_and_valid(server: Server) -> None:
    found = await got(server, "/openapi.json")

    assert found == json.loads(json.dumps(openapi(lanes=LANES)))
    assert [str(each) for each in OpenAPIV31SpecValidator(found).iter_errors()] == []


@pytest.mark.slow
async def test_the_asyncapi_document_is_served_and_valid(server: Server) -> None:
    found = await got(server, "/asyncapi.json")

    assert found == json.loads(json.dumps(asyncapi(names=NAMES, lanes=LANES)))
    errors = Draft7Validator(json.loads(ASYNCAPI_3.read_text())).iter_errors(found)
    assert [f"{'/'.join(map(str, each.absolute_path))}: {each.message[:200]}" for each in errors] == []


def test_the_names_of_another_namespace_are_in_its_document() -> None:
    found = json.dumps(asyncapi(names=Names(namespace="staging"), lanes=LANES))

    assert '"staging.requests"' in found
    assert '"lane.' not in found


async def test_every_path_is_in_the_document_and_no_other() -> None:
    settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"))
    served = Gateway(settings, client_for(settings), opened(settings)).handlers().keys() | {
        ("GET", "/healthz"),
        ("GET", "/readyz"),
    }

    paths = openapi(lanes=LANES)["paths"].items()
    assert {(method.upper(), path) for path, methods in paths for method in methods} == served


def test_every_header_that_a_requester_may_set_is_in_the_documents() -> None:
    assert schemas.headers().keys() == n.PUBLIC | {n.ANTHROPIC_BETA}
    over_http = {each["name"] for each in openapi(lanes=LANES)["paths"]["/v1/messages"]["post"]["parameters"]}
    assert over_http >= n.PUBLIC - REFUSED_HEADERS.keys()
    assert not over_http & REFUSED_HEADERS.keys()


@given(
    name=st.sampled_from(sorted(n.PUBLIC - {n.AT, n.BODY, n.BODY_SHA256})),
    value=st.integers(-2, 2 * MAX_DELAY_MS)
    | st.booleans()
    | st.sampled_from(["true", "false", "soon", "10", "-1", ""]),
)
def test_a_headers_schema_allows_what_the_codec_accepts(name: str, value: Any) -> None:
    allows = Draft202012Validator(schemas.amqp_headers()[name]).is_valid(value)
    try:
        codec.read({name: value})
    except RequestProblem:
        # digits are a number only if they are in its bounds, which a schema for text cannot say
        assert not allows or (isinstance(value, str) and value.isdigit())
    else:
        assert allows


@given(st.dictionaries(st.sampled_from(sorted(EMPTY)), Json | st.just([{"role": "user", "content": "x"}]), max_size=4))
def test_the_bodys_schema_allows_what_the_codec_accepts(said: dict[str, Any]) -> None:
    schema = {"oneOf": [schemas.messages_body(), schemas.prompt_body()]}
    try:
        bodies.check(said)
    except RequestProblem:
        assert not Draft202012Validator(schema).is_valid(said)
    else:
        assert Draft202012Validator(schema).is_valid(said)


@pytest.mark.parametrize("code", PROBLEMS)
def test_every_problem_document_fits_the_schema_and_a_mixed_one_does_not(code: str) -> None:
    document = json.loads(RequestProblem(code, "detail").document(request="r", attempts=1))

    Draft202012Validator(problem()).validate(document)
    assert not Draft202012Validator(problem()).is_valid({**document, "title": "Another"})
    assert not Draft202012Validator(problem()).is_valid({**document, "more": 1})


@pytest.mark.slow
async def test_made_up_calls_past_the_lanes_are_answered_as_the_document_says() -> None:
    from tests.support.made_up_calls import (
        make_up,
    )  # here, because its import takes as long as all fast tests of this file

    paths = {COUNT_TOKENS, MODELS, MODEL, "/healthz", "/readyz", "/openapi.json", "/asyncapi.json"}
    async with SimulatedAPI() as api:
        settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"), gateway=GatewaySettings(port=0))
        settings = with_provider(settings, api.base_url, key="simulated")
        routes = Gateway(settings, client_for(settings), opened(settings))
        async with Server(routes.reasons, host="127.0.0.1", port=0, routes=routes) as made:
            assert await asyncio.to_thread(make_up, made.url, paths=paths, examples=15) > len(paths)
