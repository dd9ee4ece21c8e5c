"""Lists the faults that the simulated API can produce, reads from prompts and options which ones are wanted, and
chooses which fault hits a call (docs/simulated.md).

Markers in the last user message:

    [[fault: NAME key=value … xN]]      only the first N calls with this prompt fail; without xN all of them
    [[latency: 500ms]]                  this answer takes this long, whatever the options say
    [[tokens: 200]]                     this answer is filled up to this many tokens, whatever the options say

In the options, a random fault is written as in a marker, without brackets and `fault:`. Several fault markers take
effect one after the other: `[[fault: overloaded x2]] [[fault: reset x1]]` fails three times, then answers. Durations
are `500ms`, `2s` or `1h`. A marker that cannot be read is answered with 400, so that a typo is noticed.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from typing import Any, Final

from cachetools import LRUCache

ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}

REFUSED: Final[Mapping[str, tuple[int, str]]] = {
    "invalid": (400, "messages: this request is invalid because its prompt asked for that"),
    "prompt_too_long": (400, "prompt is too long: 1000001 tokens > 1000000 maximum"),
    "usage_limit": (400, "You have reached your specified API usage limits. You will regain access on 2026-12-01."),
    "authentication": (401, "invalid x-api-key"),
    "billing": (402, "Your organization's payment failed."),
    "permission": (403, "Your API key does not have permission to use the specified resource."),
    "not_found": (404, "The requested resource could not be found."),
    "too_large": (413, "Request exceeds the maximum size"),
    "rate_limited": (429, "This request would exceed your organization's rate limit."),
    "acceleration": (429, "This request would exceed the limit on how fast usage may grow."),
    "spend_limit": (429, "Your organization has reached its monthly API usage threshold."),
    "server_error": (500, "Internal server error"),
    "unavailable": (503, "Service unavailable"),
    "overloaded": (529, "Overloaded"),
}
"""Faults that are error answers. In a marker, `retry_after=` sets the header `retry-after` (`none`: no header)."""

BROKEN: Final[Mapping[str, str]] = {
    "html": "502 with a page of HTML, as from a proxy",
    "hang": "the request is taken, and nothing comes",
    "slow_first_byte": "nothing comes for `delay=` (10s), then the answer",
    "stall": "half of the answer, nothing for `delay=` (1h), then the rest",
    "drip": "the answer byte by byte, each after `delay=` (1s)",
    "error_mid_stream": "half of the stream, then an error event (`type=overloaded_error`); not streamed: that error",
    "cut": "half of the answer, then a clean end of the transfer",
    "truncated": "half of the answer, then the connection closes before the announced end",
    "reset": "a TCP reset, `at=start` or `at=middle` (streamed: middle, else start)",
    "broken_json": "a whole answer (or one event of it) that is not JSON",
    "not_a_message": "200 with JSON that is no Message",
    "unfinished": "a whole Message (or stream) without a stop_reason",
    "refusal": "an answer with the stop_reason `refusal` and `category=` (cyber); `at=middle`: after half a text",
}

IN_BATCHES: Final[Mapping[str, str]] = {
    "expired": "the request expires",
    "no_line": "the results have no line of the request",
    "vanish": "the batch is gone from now on",
}
"""Further faults of batches; live calls are answered."""

_RETRY_AFTER: Final[Mapping[str, str]] = {"rate_limited": "1", "acceleration": "1"}
_DELAYS_S: Final[Mapping[str, float]] = {"slow_first_byte": 10.0, "stall": 3600.0, "drip": 1.0}
_ERROR_CODES: Final[Mapping[str, str]] = {
    "spend_limit": "enforced_spend_limit_reached",
    "acceleration": "ramp_limit_exceeded",
}
_PARAMETERS: Final = frozenset({"retry_after", "delay", "type", "at", "category"})
_MARKER: Final = re.compile(r"\[\[\s*(fault|latency|tokens)\s*:\s*([^\[\]]*?)\s*\]\]")


@dataclass(slots=True)
class Refusal(Exception):
    """Raised when the simulated API answers a call with an error. `outcome`: its name in the API's statistics."""

    status: int
    message: str
    _: KW_ONLY
    outcome: str
    details: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> bytes:
        return error_body(ERROR_TYPES[self.status], self.message, details=self.details, request_id=request_id)


def error_body(type: str, message: str, *, request_id: str, details: Mapping[str, Any] | None = None) -> bytes:
    """An error in Anthropic's format."""
    error: dict[str, Any] = {"type": type, "message": message}
    if details is not None:
        error["details"] = details
    return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()


def event(type: str, **fields: Any) -> bytes:
    """One event of Anthropic's stream."""
    return b"event: %b\ndata: %b\n\n" % (type.encode(), json.dumps({"type": type, **fields}).encode())


def invalid(message: str) -> Refusal:
    """The error 400 for an invalid request."""
    return Refusal(400, message, outcome="invalid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to produce. `times`: how many calls with the same prompt it hits; None: all."""

    name: str
    times: int | None = None
    retry_after: str | None = None
    delay_s: float = 0.0
    type: str = "overloaded_error"
    at: str | None = None
    category: str = "cyber"

    def refusal(self) -> Refusal | None:
        if self.name not in REFUSED:
            return None
        status, message = REFUSED[self.name]
        code = _ERROR_CODES.get(self.name)
        retry_after = self.retry_after or _RETRY_AFTER.get(self.name, "none")
        return Refusal(
            status,
            message,
            outcome=self.name,
            details={"error_code": code} if code else None,
            headers={} if retry_after == "none" else {"retry-after": retry_after},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the markers in one prompt ask for."""

    faults: tuple[Fault, ...] = ()
    latency_s: float | None = None
    tokens: int | None = None


NO_SCRIPT: Final = Script()


class Faults:
    """Chooses a call's fault: by the markers in its prompt, else at random. Calls are counted by prompt, for `x2`."""

    def __init__(self, ratios: Mapping[str, float], *, seed: int, prompts_counted: int = 100_000) -> None:
        if not all(0 <= share <= 1 for share in ratios.values()) or sum(ratios.values()) > 1 + 1e-9:
            raise ValueError(f"the shares of the faults must be 0 to 1, and 1 at most together: {dict(ratios)}")
        self._ratios = [(parse_fault(text), share) for text, share in ratios.items()]
        self._rng = random.Random(seed)
        self._seen: LRUCache[bytes, int] = LRUCache(prompts_counted)

    def choose(self, script: Script, prompt: str) -> Fault | None:
        if script.faults:
            return self._scripted(script.faults, prompt)
        return self.draw()

    def draw(self) -> Fault | None:
        """A random fault, or none."""
        if not self._ratios:
            return None
        drawn = self._rng.random()
        for fault, share in self._ratios:
            if drawn < share:
                return fault
            drawn -= share
        return None

    def _scripted(self, faults: tuple[Fault, ...], prompt: str) -> Fault | None:
        key = blake2b(prompt.encode(errors="replace"), digest_size=16).digest()
        self._seen[key] = nth = self._seen.get(key, 0) + 1
        for fault in faults:
            if fault.times is None or nth <= fault.times:
                return fault
            nth -= fault.times
        return None


def parse_script(prompt: str) -> Script:
    """The markers in a prompt. Raises `Refusal` (400)."""
    if "[[" not in prompt:
        return NO_SCRIPT
    faults: list[Fault] = []
    latency_s: float | None = None
    tokens: int | None = None
    try:
        for kind, value in _MARKER.findall(prompt):
            match kind:
                case "fault":
                    faults.append(parse_fault(value))
                case "latency":
                    latency_s = _seconds(value)
                case _:
                    tokens = int(value)
    except ValueError as error:
        raise invalid(f"marker in the prompt: {error}") from error
    return Script(faults=tuple(faults), latency_s=latency_s, tokens=tokens)


def parse_fault(text: str) -> Fault:
    """A fault, such as `overloaded retry_after=2 x1`. Raises `ValueError` that names what is allowed."""
    name, *words = text.split() or [""]
    if name not in (known := [*REFUSED, *BROKEN, *IN_BATCHES]):
        raise ValueError(f"no fault {name!r}; there are {', '.join(known)}")
    times: int | None = None
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if re.fullmatch(r"x[1-9]\d{0,5}", word):
            times = int(word[1:])
        elif equals and value and key in _PARAMETERS:
            given[key] = value
        else:
            raise ValueError(f"fault {name}: {word!r} is neither xN nor one of {', '.join(sorted(_PARAMETERS))}=…")
    if given.get("at") not in (None, "start", "middle"):
        raise ValueError(f"fault {name}: at= is start or middle, not {given['at']!r}")
    return Fault(
        name=name,
        times=times,
        retry_after=given.get("retry_after"),
        delay_s=_seconds(given["delay"]) if "delay" in given else _DELAYS_S.get(name, 0.0),
        type=given.get("type", "overloaded_error"),
        at=given.get("at"),
        category=given.get("category", "cyber"),
    )


def parse_share(text: str) -> tuple[str, float]:
    """NAME=SHARE, such as `rate_limited retry_after=2=0.1`. Raises `ValueError` that names what is allowed."""
    fault, equals, share_text = text.rpartition("=")
    try:
        share = float(share_text)
    except ValueError:
        share = -1.0
    if not equals or not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not NAME=SHARE with a share from 0 to 1")
    parse_fault(fault)
    return fault, share


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|h)", text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration such as 500ms or 2s")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "h": 3600.0}[found[2]]
