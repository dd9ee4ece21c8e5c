"""Reads the body of a Message Batch from a file, one request at a time: `{"requests": [{"custom_id": …, "params": {…}},
…]}`. Only what surrounds `params` is read here; they are found by counting brackets, and passed on byte for byte."""

import json
import re
from collections.abc import Iterator
from mmap import mmap
from typing import Any, Final, NamedTuple

from service.gateway.problems import ApiError

CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MARK: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_SCALAR: Final = re.compile(rb"[a-zA-Z0-9+.-]+")
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")
_FIELDS: Final = frozenset({"custom_id", "params"})


class Item(NamedTuple):
    """One request of a batch. `number`: its index in the body. `begin` and `end`: where its params are
    in the file."""

    number: int
    custom_id: str
    begin: int
    end: int


class BatchBody:
    """The body of a Message Batch. `most_requests`; `most_bytes`, `most_values` of one request: more are refused."""

    def __init__(self, data: mmap, *, most_requests: int, most_bytes: int, most_values: int) -> None:
        self._data = data
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._most_marks = 2 * most_values
        self._at = 0
        self._where = ""

    def items(self) -> Iterator[Item]:
        """Raises ApiError where the body is not what it should be, which names the request by its index."""
        seen: set[str] = set()
        found = False
        for name in self._fields():
            if name != "requests":
                raise _invalid(f"{name[:80]}: Extra inputs are not permitted")
            if found or self._next() != b"[":
                raise _invalid("requests: Input should be a valid array, given once")
            found = True
            for index in self._elements():
                if index >= self._most_requests:
                    raise _invalid(f"requests: at most {self._most_requests} are allowed")
                item = self._item(index)
                if item.custom_id in seen:
                    raise _invalid(f"requests.{index}.custom_id: {item.custom_id} is duplicated")
                seen.add(item.custom_id)
                yield item
            self._where = ""
        if not seen:
            raise _invalid("requests: at least one request is required")
        if self._next():
            raise self._not_json()

    def _item(self, index: int) -> Item:
        where = f"requests.{index}"
        self._where = f"{where}: "
        if self._next() != b"{":
            raise _invalid(f"{where}: Input should be a valid dictionary")
        custom_id: Any = None
        params: tuple[int, int] | None = None
        begin = self._at
        for name in self._fields():
            if name not in _FIELDS:
                raise _invalid(f"{where}.{name[:80]}: Extra inputs are not permitted")
            is_object = self._next() == b"{"
            value = self._value(where)
            if name == "params" and is_object and params is None:
                params = value
            elif name == "custom_id" and custom_id is None:
                custom_id = self._parsed(*value)
            else:
                what = "a valid dictionary" if not is_object else "given once"
                raise _invalid(f"{where}.{name}: Input should be {what}")
            if self._at - begin > self._most_bytes:
                raise self._too_large(where)
        if not isinstance(custom_id, str) or not CUSTOM_ID.fullmatch(custom_id):
            raise _invalid(f"{where}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'")
        if params is None:
            raise _invalid(f"{where}.params: Field required")
        return Item(index, custom_id, *params)

    def _fields(self) -> Iterator[str]:
        """The names of an object's fields; after each, its value must be read. The next byte has to be `{`."""
        if self._next() != b"{":
            raise self._not_json()
        self._at += 1
        if self._next() == b"}":
            self._at += 1
            return
        while True:
            self._next()
            name = self._parsed(*self._string())
            if not isinstance(name, str) or self._next() != b":":
                raise self._not_json()
            self._at += 1
            yield name
            if self._goes_on(b"}"):
                return

    def _elements(self) -> Iterator[int]:
        """The indices of an array's elements; after each, it must be read. The next byte has to be `[`."""
        self._at += 1
        if self._next() == b"]":
            self._at += 1
            return
        index = 0
        while True:
            yield index
            index += 1
            if self._goes_on(b"]"):
                return

    def _goes_on(self, end: bytes) -> bool:
        """Read what follows a field or an element. Returns whether it was the last one."""
        mark = self._next()
        self._at += 1
        if mark not in (b",", end):
            raise self._not_json()
        return mark == end

    def _next(self) -> bytes:
        """The next byte that is no space; empty at the end. It is still to be read."""
        found = _SPACE.match(self._data, self._at)
        assert found is not None
        self._at = found.end()
        return self._data[self._at : self._at + 1]

    def _string(self) -> tuple[int, int]:
        found = _STRING.match(self._data, self._at, self._at + self._most_bytes)
        if found is None:
            raise self._not_json()
        self._at = found.end()
        return found.span()

    def _value(self, where: str) -> tuple[int, int]:
        begin = self._at
        mark = self._data[begin : begin + 1]
        if mark == b'"':
            return self._string()
        if mark not in (b"{", b"["):
            if (found := _SCALAR.match(self._data, begin, begin + self._most_bytes)) is None:
                raise self._not_json()
            self._at = found.end()
            return found.span()
        depth = 0
        limit = begin + self._most_bytes
        for marks, found in enumerate(_MARK.finditer(self._data, begin, limit)):
            first = self._data[found.start()]
            if first in _OPENING:
                depth += 1
            elif first in _CLOSING:
                depth -= 1
            elif found.end() - found.start() == 1:  # a string without an end
                break
            if not depth:
                self._at = found.end()
                return begin, self._at
            if marks > self._most_marks:
                raise ApiError(413, f"{where}: more than {self._most_marks // 2} keys and values")
        if limit < len(self._data):
            raise self._too_large(where)
        raise self._not_json()

    def _parsed(self, begin: int, end: int) -> Any:
        try:
            return json.loads(self._data[begin:end])
        except (ValueError, RecursionError):
            raise self._not_json() from None

    def _too_large(self, where: str) -> ApiError:
        return ApiError(413, f"{where}: larger than {self._most_bytes} bytes")

    def _not_json(self) -> ApiError:
        return _invalid(f"{self._where}The request body is not valid JSON: near byte {self._at}")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message)
