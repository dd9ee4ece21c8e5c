"""The faults that the simulated API can produce: reads from prompts and options which ones are wanted, and chooses
which fault hits a call (docs/simulated.md). Tests have more of them (tests/support/faulty_api.py).

Markers in the last user message:

    [[fault: NAME key=value … xN]]      only the first N calls with this prompt fail; without xN all of them
    [[latency: 500ms]]                  this answer takes this long, whatever the options say
    [[tokens: 200]]                     this answer is filled up to this many tokens, whatever the options say

In the options, a random fault is written as in a marker, without brackets and `fault:`. Several fault markers take
effect one after the other: `[[fault: overloaded x2]] [[fault: invalid x1]]` fails three times, then answers. Durations
are `500ms`, `2s` or `1h`. A marker that cannot be read is answered with 400, so that a typo is noticed.
"""

import json
import random
import re
from collections.abc import Collection, Mapping
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
    "rate_limited": (429, "This request would exceed your organization's rate limit."),
    "server_error": (500, "Internal server error"),
    "overloaded": (529, "Overloaded"),
}
"""Faults that are error answers. In a marker, `retry_after=` sets the header `retry-after` (`none`: no header)."""
MID_STREAM: Final = "error_mid_stream"
"""Half of the stream, then an error event (`type=overloaded_error`); not streamed: that error."""
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
    given: Mapping[str, str] = field(default_factory=dict)
    """Its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMarkers:
    """What the markers in one prompt ask for."""

    faults: tuple[Fault, ...] = ()
    latency_s: float | None = None
    tokens: int | None = None


NO_SCRIPT: Final = PromptMarkers()


class Faults:
    """Chooses a call's fault: by the markers in its prompt, else at random. Calls are counted by prompt, for `x2`."""

    refused: Mapping[str, tuple[int, str]] = REFUSED
    others: Collection[str] = (MID_STREAM,)
    parameters: Collection[str] = ("retry_after", "type")

    def __init__(self, ratios: Mapping[str, float], *, seed: int, prompts_counted: int = 100_000) -> None:
        if not all(0 <= share <= 1 for share in ratios.values()) or sum(ratios.values()) > 1 + 1e-9:
            raise ValueError(f"the shares of the faults must be 0 to 1, and 1 at most together: {dict(ratios)}")
        self._ratios = [(self.read(text), share) for text, share in ratios.items()]
        self._rng = random.Random(seed)
        self._seen: LRUCache[bytes, int] = LRUCache(prompts_counted)

    def read(self, text: str) -> Fault:
        """A fault, such as `overloaded retry_after=2 x1`. Raises `ValueError` that names what is allowed."""
        fault = parse_fault(text)
        self._check(fault)
        return fault

    def _check(self, fault: Fault) -> None:
        if fault.name not in (known := [*self.refused, *self.others]):
            raise ValueError(f"no fault {fault.name!r}; there are {', '.join(known)}")
        if unknown := fault.given.keys() - set(self.parameters):
            allowed = ", ".join(sorted(self.parameters))
            raise ValueError(f"fault {fault.name}: {min(unknown)!r} is neither xN nor one of {allowed}")

    def choose(self, script: PromptMarkers, prompt: str) -> Fault | None:
        """Raises `Refusal` (400) for a marker of an unknown fault."""
        if not script.faults:
            return self.draw()
        try:
            for fault in script.faults:
                self._check(fault)
        except ValueError as error:
            raise invalid(f"marker in the prompt: {error}") from error
        return self._scripted(script.faults, prompt)

    def refusal(self, fault: Fault) -> Refusal | None:
        """The error answer that this fault is; None: it is another kind."""
        if fault.name not in self.refused:
            return None
        status, message = self.refused[fault.name]
        retry_after = fault.given.get("retry_after", "1" if status == 429 else "none")
        headers = {} if retry_after == "none" else {"retry-after": retry_after}
        return Refusal(status, message, outcome=fault.name, headers=headers)

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


def parse_script(prompt: str) -> PromptMarkers:
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
                    latency_s = seconds(value)
                case _:
                    tokens = int(value)
    except ValueError as error:
        raise invalid(f"marker in the prompt: {error}") from error
    return PromptMarkers(faults=tuple(faults), latency_s=latency_s, tokens=tokens)


def parse_fault(text: str) -> Fault:
    """A fault of any name, such as `overloaded retry_after=2 x1`. Raises `ValueError`."""
    name, *words = text.split() or [""]
    times: int | None = None
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if re.fullmatch(r"x[1-9]\d{0,5}", word):
            times = int(word[1:])
        elif equals and value:
            given[key] = value
        else:
            raise ValueError(f"fault {name}: {word!r} is neither xN nor a parameter such as retry_after=2")
    return Fault(name=name, times=times, given=given)


def parse_share(text: str) -> tuple[str, float]:
    """NAME=SHARE, such as `rate_limited retry_after=2=0.1`. Raises `ValueError`."""
    fault, equals, share_text = text.rpartition("=")
    try:
        share = float(share_text)
    except ValueError:
        share = -1.0
    if not equals or not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not NAME=SHARE with a share from 0 to 1")
    return fault, share


def seconds(text: str) -> float:
    """Read a duration such as 500ms. Raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|h)", text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration such as 500ms or 2s")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "h": 3600.0}[found[2]]
