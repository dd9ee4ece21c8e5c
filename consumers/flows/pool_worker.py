"""The process of a pool (`process_pool.py`): `python -m consumers.flows.pool_worker MEMORY_BYTES CPU_S`.

It calls functions, one at a time. Calls come from standard input and results go to standard output; both are moved to
other descriptors before a function runs, so that a function that prints disturbs nothing. The process imports little,
because each core has one.
"""

import ctypes
import json
import math
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

CALL: Final = struct.Struct(">cHII")
"""Before each call: its kind, the length of the function's name, the most bytes of the result, and the length of the
body."""
RESULT: Final = struct.Struct(">cI")
"""Before each result: its kind, and its length."""
RUN, RUN_BATCH, RUN_BYTES, IMPORT = b"r", b"b", b"y", b"i"
"""A function gets the value that the body is the JSON of, and its result is sent as JSON; or it gets a list of values,
and each result is sent; or it gets the body, and returns bytes; or it is only imported."""
ANSWERED, FAILED, REJECTED, UNSENDABLE = b"a", b"f", b"j", b"u"
NICE = 5
"""The worker's event loop goes before what its processes compute, unless that is little."""
ERROR_TEXT_LENGTH = 500
_PR_SET_PDEATHSIG = 1


class Unsendable(Exception):
    """A function's result that cannot be the body of a reply; the text says why."""


def import_function(run: str) -> Callable[[Any], Any]:
    """Import `module:function`, from the folder of the process too. Raises what the import raises."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    module, _, name = run.partition(":")
    found = getattr(import_module(module), name)
    if not callable(found):
        raise TypeError(f"{run} is no function")
    return found  # type: ignore[no-any-return]


def as_json(result: object, *, most_bytes: int) -> bytes:
    """Raises Unsendable."""
    try:
        body = json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsendable(f"its result is no JSON: {error}"[:ERROR_TEXT_LENGTH]) from None
    if len(body) > most_bytes:
        raise Unsendable(f"its result has {len(body)} bytes, and {most_bytes} is the most that can be sent back")
    return body


def result_of_one(result: object, *, most_bytes: int) -> tuple[bytes, bytes]:
    """The kind and the text of one result of a function that takes many inputs."""
    if isinstance(result, Exception):
        kind, text = describe(result)
        return kind, text.encode(errors="replace")
    try:
        return ANSWERED, as_json(result, most_bytes=most_bytes)
    except Unsendable as error:
        return UNSENDABLE, str(error).encode(errors="replace")


def checked(results: object, *, count: int) -> Sequence[object]:
    """What a function returned for so many inputs. Raises ValueError if it is no list of the same length."""
    if not isinstance(results, (list, tuple)):
        raise ValueError(f"it returned {type(results).__name__}, and not a list with a result for each of {count}")
    if len(results) != count:
        raise ValueError(f"it returned {len(results)} results for {count}")
    return results


def describe(error: BaseException) -> tuple[bytes, str]:
    """The kind of a function's exception (a failure, or `lanekeeper.Rejected`, which no retry mends), and its text."""
    problems = sys.modules.get("lanekeeper.contract.problems")
    if problems is not None and isinstance(error, problems.Rejected):
        return REJECTED, str(error)[:ERROR_TEXT_LENGTH]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = "".join(
        f" at {Path(frame.filename).name}:{frame.lineno}" for frame in frames[-1:]
    )  # `<frozen os>` says little
    return FAILED, f"{type(error).__name__}{place}: {error}"[:ERROR_TEXT_LENGTH]


def main(memory_bytes: int, cpu_s: int) -> None:
    """Answer calls until the worker closes standard input. `memory_bytes`: of address space. `cpu_s`: of CPU time, for
    each call. 0: no limit."""
    calls, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if not cpu_s:
        os.nice(NICE)
    if sys.platform == "linux":
        # a killed worker's processes end in the middle of a call; elsewhere, after it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if memory_bytes:  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    process = os.getpid()
    functions: dict[str, Callable[[Any], Any]] = {}
    while len(head := calls.read(CALL.size)) == CALL.size:
        kind, name_length, most_bytes, body_length = CALL.unpack(head)
        run, body = calls.read(name_length).decode(), calls.read(body_length)
        if cpu_s:
            _, hard_s = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard_s))
        try:
            function = functions.setdefault(run, functions.get(run) or import_function(run))
            answer = ANSWERED, b"" if kind == IMPORT else _call(function, body, kind, most_bytes)
        except Unsendable as error:
            answer = UNSENDABLE, str(error).encode(errors="replace")
        except Exception as error:
            found, text = describe(error)
            answer = found, text.encode(errors="replace")
        if os.getpid() != process:  # a copy that the function has forked, and that came back from it too
            os._exit(0)
        results.write(RESULT.pack(answer[0], len(answer[1])))
        results.write(answer[1])
        results.flush()


def _call(function: Callable[[Any], Any], body: bytes, kind: bytes, most_bytes: int) -> bytes:
    if kind == RUN_BYTES:
        return function(body)  # type: ignore[no-any-return]
    given = json.loads(body)
    if kind == RUN:
        return as_json(function(given), most_bytes=most_bytes)
    results = checked(function(given), count=len(given))
    return packed(result_of_one(each, most_bytes=most_bytes) for each in results)


def packed(results: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Several results as one."""
    return b"".join(RESULT.pack(kind, len(text)) + text for kind, text in results)


def unpacked(several: bytes) -> list[tuple[bytes, bytes]]:
    """The opposite of `packed`."""
    found, at = list[tuple[bytes, bytes]](), 0
    while at < len(several):
        kind, size = RESULT.unpack_from(several, at)
        begin = at + RESULT.size
        at = begin + size
        found.append((kind, several[begin:at]))
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
