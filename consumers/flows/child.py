"""The process in which CPU-bound handlers run, one call at a time: `python -m consumers.flows.child`.

Calls come from standard input, and their results go to standard output; both are moved to other descriptors before a
handler runs, so that a handler that prints disturbs nothing. The process imports little, because each core has one.
"""

import ctypes
import json
import os
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

CALL: Final = struct.Struct(">cHII")
"""Before each call: its kind, the length of the function's name, the most bytes of the result, and the length of the
body."""
RESULT: Final = struct.Struct(">cI")
"""Before each result: its kind, and its length."""
RUN, MANY, IMPORT = b"r", b"m", b"i"
ANSWERED, FAILED, REJECTED, UNSENDABLE = b"a", b"f", b"j", b"u"
NICE = 5
"""The loop of the worker goes before its handlers."""
TEXT_LENGTH = 500
_PR_SET_PDEATHSIG = 1


class Unsendable(Exception):
    """A handler's result that cannot be the body of a reply; the text says why."""


def find(run: str) -> Callable[[Any], Any]:
    """Import `module:function`, from the folder of the process too. Raises what the import raises."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    module, _, name = run.partition(":")
    found = getattr(import_module(module), name)
    if not callable(found):
        raise TypeError(f"{run} is no function")
    return found  # type: ignore[no-any-return]


def written(result: object, *, most_bytes: int) -> bytes:
    """A handler's result as JSON. Raises Unsendable."""
    try:
        body = json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsendable(f"its result is no JSON: {error}"[:TEXT_LENGTH]) from None
    if len(body) > most_bytes:
        raise Unsendable(f"its result has {len(body)} bytes, and {most_bytes} is the most that can be sent back")
    return body


def answered(result: object, *, most_bytes: int) -> tuple[bytes, bytes]:
    """The kind of one result among many, and its text."""
    if isinstance(result, Exception):
        kind, text = told(result)
        return kind, text.encode(errors="replace")
    try:
        return ANSWERED, written(result, most_bytes=most_bytes)
    except Unsendable as error:
        return UNSENDABLE, str(error).encode(errors="replace")


def checked(results: object, *, count: int) -> Sequence[object]:
    """What a function returned for so many inputs. Raises ValueError if it is no list of the same length."""
    if not isinstance(results, (list, tuple)):
        raise ValueError(f"it returned {type(results).__name__}, and not a list with a result for each of {count}")
    if len(results) != count:
        raise ValueError(f"it returned {len(results)} results for {count}")
    return results


def told(error: BaseException) -> tuple[bytes, str]:
    """How a handler's exception ends its attempt: as a failure, or as `lanekeeper.Rejected`, which no retry mends."""
    problems = sys.modules.get("lanekeeper.contract.problems")
    is_rejected = problems is not None and isinstance(error, problems.Rejected)
    if is_rejected:
        return REJECTED, str(error)[:TEXT_LENGTH]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = "".join(
        f" at {Path(frame.filename).name}:{frame.lineno}" for frame in frames[-1:]
    )  # `<frozen os>` says little
    return FAILED, f"{type(error).__name__}{place}: {error}"[:TEXT_LENGTH]


def main() -> None:
    """Answer calls until the worker ends."""
    calls: queue.SimpleQueue[tuple[bytes, str, int, bytes]] = queue.SimpleQueue()
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.nice(NICE)
    if sys.platform == "linux":  # `_read` cannot run while a handler holds the interpreter's lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    process = os.getpid()
    threading.Thread(target=_read, args=(requests, calls), daemon=True).start()
    functions: dict[str, Callable[[Any], Any]] = {}
    while True:
        kind, run, most_bytes, body = calls.get()
        try:
            function = functions.setdefault(run, functions.get(run) or find(run))
            answer = ANSWERED, b"" if kind == IMPORT else _called(function, json.loads(body), kind, most_bytes)
        except Unsendable as error:
            answer = UNSENDABLE, str(error).encode(errors="replace")
        except Exception as error:
            found, text = told(error)
            answer = found, text.encode(errors="replace")
        if os.getpid() != process:  # a copy that the handler has forked, and that came back from it too
            os._exit(0)
        results.write(RESULT.pack(answer[0], len(answer[1])))
        for begin in range(0, len(answer[1]), 65536):
            results.write(answer[1][begin : begin + 65536])


def _called(function: Callable[[Any], Any], given: Any, kind: bytes, most_bytes: int) -> bytes:
    if kind != MANY:
        return written(function(given), most_bytes=most_bytes)
    results = [answered(each, most_bytes=most_bytes) for each in checked(function(given), count=len(given))]
    return b"".join(RESULT.pack(each, len(text)) + text for each, text in results)


def _read(requests: BinaryIO, calls: "queue.SimpleQueue[tuple[bytes, str, int, bytes]]") -> None:
    """Ends the process and those that its handlers started when the worker has ended, also in the middle of a call."""
    while len(head := requests.read(CALL.size)) == CALL.size:
        kind, name, most_bytes, size = CALL.unpack(head)
        calls.put((kind, requests.read(name).decode(), most_bytes, requests.read(size)))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
