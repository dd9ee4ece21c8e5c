"""The border to aiormq: what it raises becomes ours, and a cancellation that it loses is found again."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq.exceptions import AMQPError

from lanekeeper.contract.problems import BrokerError, BrokerUnreachable


@contextmanager
def border(what: str, *, lost: type[BrokerError] = BrokerUnreachable) -> Iterator[None]:
    """Translate what aiormq raises inside when a channel or connection is lost, or does not answer, into `lost`."""
    before = cancellations()
    try:
        yield
    except (AMQPError, RuntimeError, OSError, TimeoutError) as error:
        if cancellations() == before:
            raise lost(f"{what}: {said(error)}") from error
    except asyncio.CancelledError:
        if asks_to_stop():
            raise
        raise lost(f"{what}: the connection was lost") from None
    except Exception as error:
        if not is_nameless(error):
            raise
        if cancellations() == before:
            raise lost(f"{what}: the connection was lost") from error
    if cancellations() > before:
        raise asyncio.CancelledError


def is_nameless(error: Exception) -> bool:
    """Whether it is what aiormq raises in a call that begins just after its connection closed: a bare `Exception`."""
    return type(error) is Exception


def said(error: BaseException) -> str:
    """What an exception says, or, where that is nothing, what it is."""
    return str(error) or type(error).__name__


def asks_to_stop() -> bool:
    """Whether a CancelledError was asked for: aiormq also raises it where a channel or connection closed."""
    return cancellations() > 0


def cancellations() -> int:
    """How often this task was told to stop. Grown over a call of aiormq's, it says that the call lost one of them.

    aiormq waits with `asyncio.wait_for`, and that forgets, before Python 3.12, a cancellation that comes in the same
    moment as the answer: 20 of 400 that came while a queue was being declared, and whoever consumed it never ended.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
