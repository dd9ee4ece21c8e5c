"""Any value in any field: only JSON is read, in linear time, and no error quotes the content."""

import ast
import gzip
import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import tracing
from service.telemetry import redaction
from tests.support.sources import product
from topology.codec import headers as header_rules
from topology.codec.decoding import Request, decode
from topology.codec.headers import carried
from topology.lanes import CRITICAL

NOW_MS = 1_790_000_000_000
KEY = "critical.tests.x"


def decoded(message: Message) -> Request:
    return decode(message, lane=CRITICAL, request_id="h-1", hop=None, now_ms=NOW_MS)


def message(body: bytes = b'{"prompt": "fine"}', **more: Any) -> Message:
    return Message(**{"body": body, "routing_key": KEY, **more})


# ---- linear time (T14) -----------------------------------------------------------------------------------------------

LONG = 64 * 1024
STALL_S = 0.1
PATHOLOGICAL = {
    "digits": "9" * LONG,
    "spaces": " " * LONG,
    "spaces and a letter": " " * LONG + "x",
    "slashes": "/" * LONG,
    "a scheme without end": "a://" * (LONG // 4),
    "bearers": "bearer " * (LONG // 7),
    "keys": "sk-ant-" * (LONG // 7),
    "at signs": "a://" + "@" * LONG,
    "commas": "a=b," * (LONG // 4),
    "semicolons": "application/json;" * (LONG // 17),
    "dashes": "00-" + "-" * LONG,
    "zeros": "00-" + "0" * LONG,
    "letters": "aA" * (LONG // 2),
    "line breaks": "\r\n" * (LONG // 2),
    "escapes": "\x1b[2J" * (LONG // 4),
    "direction marks": "\u202e" * LONG,
    "quotes": '"' * LONG,
    "backslashes": "\\" * LONG,
    "stars": "x*" * (LONG // 2),
    "a time": "2026-11-21T18:00:00." + "0" * LONG,
}
HEADERS = sorted(n.PUBLIC | n.OURS | n.TRACE_CONTEXT | {n.ANTHROPIC_BETA, n.BROKER_TIMESTAMP_MS, "x-own"})
PROPERTIES = (
    "content_type", "content_encoding", "message_id", "correlation_id", "reply_to", "type", "user_id", "app_id",
)  # fmt: skip


def cpu_s(do: Any) -> float:
    began = time.thread_time()
    do()
    return time.thread_time() - began


@pytest.mark.slow
@pytest.mark.parametrize("text", PATHOLOGICAL.values(), ids=PATHOLOGICAL)
def test_64_kb_of_any_text_in_any_field_are_read_in_linear_time(text: str) -> None:
    """On the wire only the body can be that large: a short string has at most 255 bytes, and all headers together 64
    KiB."""
    inside = json.dumps({"prompt": text, "model": text[:256]}).encode()
    properties: dict[str, dict[str, Any]] = {name: {name: text} for name in PROPERTIES}
    messages = {
        **{f"header {name}": message(headers={name: text}) for name in HEADERS},
        **{f"property {name}": message(**of) for name, of in properties.items()},
        "a header's name": message(headers={text[:255]: 1, f"x-lane-{text[:200]}": 1}),
        "the key": message(routing_key=f"critical.{text}"),
        "the body": message(text.encode()),
        "in the body": message(inside),
        "as a key of the body": message(json.dumps({text: 1, "prompt": 5}).encode()),
        "as a role": message(json.dumps({"messages": [{"role": text, "content": text}], "max_tokens": text}).encode()),
    }

    def read(each: Message) -> None:
        try:
            decoded(each)
        except RequestProblem as problem:
            redaction.text(problem.detail)
        header_rules.read_hop(each.headers)
        carried(each.headers, of=Names())
        tracing.received_context(each.headers, tracing.context_in(each.headers))
        for value in (*each.headers, *each.headers.values()):
            redaction.text(str(value))

    slow = {where: took for where, each in messages.items() if (took := cpu_s(lambda each=each: read(each))) > STALL_S}
    assert slow == {}


# ---- internal headers (T24) ------------------------------------------------------------------------------------------

FORGED: dict[str, Any] = {
    **dict.fromkeys(n.OURS, "forged"),
    n.ATTEMPT: 99,
    n.FIRST_SEEN_MS: 1,
    n.DUE_MS: 4_000_000_000_000,
    n.HOP_MS: 1,
    n.BACK_MS: 1,
    n.ERRORS: ["forged"],
    n.REDELIVERED: True,
    n.SEQ: 5,
    n.REPLAYED: True,
}


def test_internal_headers_of_a_fresh_request_have_no_effect_and_are_not_passed_on() -> None:
    assert FORGED.keys() >= n.OURS
    dead_at = {n.DEAD_AT}  # older times given by the requester are ignored because of it
    for name, value in FORGED.items():
        with_it = message(headers={name: value, "x-own": 1, n.SENT_MS: NOW_MS - 5})
        without = message(headers={"x-own": 1, **({} if name in dead_at else {n.SENT_MS: NOW_MS - 5})})
        assert decoded(with_it) == decoded(without), name
        assert carried(with_it.headers, of=Names()).keys() == {"x-own", n.SENT_MS}, name


@pytest.mark.parametrize("name", ["x-lane-Attempt", "X-LANE-ATTEMPT", "x-lane-attempt ", "x-lane-attempt\0"])
def test_an_unknown_header_that_resembles_an_internal_one_is_refused(name: str) -> None:
    with pytest.raises(RequestProblem, match="unknown header"):
        decoded(message(headers={name: 99}))


# ---- content stays out of errors (T9) --------------------------------------------------------------------------------

CANARY = "KANARIENVOGEL"
WHOLE: dict[str, Any] = {
    "model": "claude-sonnet-5-5",
    "max_tokens": 10,
    "messages": [{"role": "user", "content": [{"type": "text", "text": CANARY}]}],
    "system": CANARY,
    "tools": [{"name": CANARY, "input_schema": {CANARY: CANARY}}],
}


def wrong_bodies() -> list[bytes]:
    """Bodies that contain the secret text and are each wrong in a different way."""
    whole = json.dumps(WHOLE).encode()
    at = whole.index(CANARY.encode())
    return [
        whole[: at + 5],
        whole + b"}",
        whole.replace(CANARY.encode(), CANARY.encode() + b"\xff"),
        whole.replace(CANARY.encode(), CANARY.encode() + b"\\ud800"),
        whole.replace(CANARY.encode(), CANARY.encode() + b"\n"),
        whole.replace(b'"' + CANARY.encode() + b'"', CANARY.encode()),
        gzip.compress(whole)[:-9],
        json.dumps(CANARY).encode(),
        json.dumps([CANARY]).encode(),
        *(
            json.dumps({**WHOLE, name: value}).encode()
            for name, value in [
                ("messages", CANARY),
                ("messages", [CANARY]),
                ("messages", [{"role": "user", "content": {"text": CANARY}}]),
                ("messages", [{"role": 5, "content": CANARY}]),
                ("messages", [{"content": CANARY}]),
                ("messages", [{"role": "user", "content": CANARY}] * 3 + [{"role": CANARY}]),
                ("max_tokens", CANARY),
                ("stream", CANARY),
                ("system", {"text": CANARY}),
                ("model", [CANARY]),
                ("model", CANARY * 30),
                ("prompt", CANARY),
            ]
        ),
        json.dumps({"prompt": [CANARY]}).encode(),
        json.dumps({"prompt": CANARY, "system": [CANARY]}).encode(),
        json.dumps({"prompt": CANARY, "stop": CANARY}).encode(),
        b'{"messages": [{"role": "user", "content": [{"type": "x", "'
        + CANARY.encode()
        + b'": 1, "'
        + CANARY.encode()
        + b'": 2}]}]}',
    ]


@pytest.mark.parametrize("body", wrong_bodies())
def test_no_error_quotes_the_body(body: bytes) -> None:
    for each in (message(body), message(gzip.compress(body), content_encoding="gzip")):
        with pytest.raises(RequestProblem) as raised:
            decoded(replace(each))
        assert CANARY not in raised.value.detail


# ---- one format (T13) ------------------------------------------------------------------------------------------------

EXECUTING = {"pickle", "cPickle", "dill", "marshal", "shelve", "yaml", "jsonpickle", "joblib", "cloudpickle"}


CALLS = {"eval()", "exec()", "compile()", "__import__()"}


NAMED = re.compile(rf"\b({'|'.join(EXECUTING)})\b|(?<![.\w])(eval|exec|compile|__import__)\s*\(")
"""A file without such a text need not be parsed."""


@pytest.mark.slow
def test_no_product_file_imports_a_format_that_can_execute_code() -> None:
    found = []
    suspects = {path: text for path, text in product().items() if NAMED.search(text)}
    for path, text in suspects.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & {"eval", "exec", "compile", "__import__"}
                names = {f"{each}()" for each in names}
            else:
                continue
            found += [f"{path} {name}" for name in names & EXECUTING or names & CALLS]
    assert found == ["service/gateway/app.py yaml"], "it reads documents of ours, by a loader that makes plain values"
