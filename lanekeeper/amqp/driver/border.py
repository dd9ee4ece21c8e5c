"""The border to aiormq: translates its exceptions into ours, and detects cancellations that it has lost."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq.exceptions import AMQPError

from lanekeeper.contract.problems import BrokerError, BrokerUnreachable


@contextmanager
def border(what: str, *, lost: type[BrokerError] = BrokerUnreachable) -> Iterator[None]:
    """Inside the block, what aiormq raises when a channel or connection is lost or does not answer becomes `lost`."""
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
    """Whether it is a bare `Exception`: aiormq raises one in a call that begins just after its connection closed."""
    return type(error) is Exception


def said(error: BaseException) -> str:
    """An exception's text, or the name of its class if it has none."""
    return str(error) or type(error).__name__


def asks_to_stop() -> bool:
    """Whether this task was really cancelled: aiormq also raises CancelledError when a channel or connection closes."""
    return cancellations() > 0


def cancellations() -> int:
    """How many cancellations this task has received. If a call of aiormq returns and the count has grown, aiormq lost a
    cancellation.

    aiormq waits with `asyncio.wait_for`. Before Python 3.12 this loses a cancellation that comes at the same moment as
    the answer: 20 of 400 that came while a queue was being declared, and the consumers' tasks never ended.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
