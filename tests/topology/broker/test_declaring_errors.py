"""What the broker's client raises while something is declared becomes an error of ours."""

import asyncio

import pytest
from aiormq.exceptions import AMQPConnectionError, ChannelClosed, ChannelNotFoundEntity

from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, TopologyMismatch
from topology.broker.admin.apply import broker_errors


@pytest.mark.parametrize(
    "error",
    [AMQPConnectionError("gone"), Exception(), asyncio.CancelledError(), TimeoutError(), RuntimeError("closed")],
    ids=repr,
)
def test_a_connection_that_is_lost_while_declaring_is_an_unreachable_broker(error: BaseException) -> None:
    """Also as a bare `Exception`, or as a cancellation that nobody asked for: aiormq raises both."""

    async def declare() -> None:
        with broker_errors():
            raise error

    with pytest.raises(BrokerUnreachable):
        asyncio.run(declare())


@pytest.mark.parametrize(
    ("error", "ours"),
    [(ChannelNotFoundEntity("no queue"), TopologyMismatch), (ChannelClosed(404, "why"), BrokerError)],
    ids=repr,
)
def test_a_refused_declaration_and_a_lost_connection_have_different_errors(
    error: Exception, ours: type[BrokerError]
) -> None:
    async def declare() -> None:
        with broker_errors():
            raise error

    with pytest.raises(ours) as raised:
        asyncio.run(declare())
    assert not isinstance(raised.value, BrokerUnreachable)
