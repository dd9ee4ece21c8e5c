"""Direct reply-to before RabbitMQ 4.3.5: an address is first tried on its own connection, then on the shared one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from typing_extensions import override

from consumers.replies.sender import ReplySender
from lanekeeper.amqp.confirming import Answer
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown, RequestProblem

ADDRESS = "amq.rabbitmq.reply-to.somebody"
ANSWER = Message(body=b"{}", exchange="", routing_key=ADDRESS)


@dataclass
class Line(Publisher):
    """A publisher and its connection. While `dies_by` is set, a publish closes the connection with that reason."""

    sent: list[str] = field(default_factory=list)
    dies_by: str | None = None

    def __post_init__(self) -> None:
        self.loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.connection: Any = self

    async def underlying(self) -> None:
        if self.loss.done():
            self.loss = asyncio.get_running_loop().create_future()

    @override
    async def publish(self, message: Message, *, routing_key: str, **_: Any) -> None:
        if self.dies_by is not None:
            self.loss.set_result(self.dies_by)
            raise ConfirmUnknown("connection lost")
        self.sent.append(routing_key)

    @override
    async def write(
        self, message: Message, *, exchange: str, routing_key: str, timeout_s: float = 10
    ) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.dies_by is None:
            self.sent.append(routing_key)
            answer.set_result(None)
        else:  # the connection is lost before the confirm
            answer.set_exception(ConnectionError(self.dies_by))
        return answer


def sender() -> tuple[ReplySender, Line, Line]:
    shared, own = Line(), Line()
    return ReplySender(shared, own=own), shared, own


async def test_an_address_that_accepted_a_message_is_answered_over_the_shared_connection() -> None:
    direct, shared, own = sender()
    for _ in range(3):
        await direct.send_surely(ANSWER, ADDRESS)
    await direct.send_surely(ANSWER, f"{ADDRESS}-else")
    assert own.sent == [ADDRESS, f"{ADDRESS}-else"]
    assert shared.sent == [ADDRESS, ADDRESS]


async def test_a_forged_address_is_never_answered_over_the_shared_connection() -> None:
    direct, shared, own = sender()
    own.dies_by = "INTERNAL_ERROR"
    with pytest.raises(RequestProblem, match="the broker did not make"):
        await direct.send_surely(ANSWER, ADDRESS)
    own.dies_by = None
    with pytest.raises(RequestProblem):
        await direct.send(ANSWER, ADDRESS)
    assert direct.refusal(ADDRESS) is not None
    assert not own.sent + shared.sent


async def test_after_the_shared_connection_was_lost_the_address_is_tried_separately_again() -> None:
    """Meanwhile it may have become deadly, because the cluster removed its node."""
    direct, shared, own = sender()
    await direct.send_surely(ANSWER, ADDRESS)
    shared.dies_by = own.dies_by = "INTERNAL_ERROR"
    with pytest.raises(RequestProblem):
        await direct.send_surely(ANSWER, ADDRESS)
    assert shared.loss.done()
    assert direct.refusal(ADDRESS) is not None


async def test_a_lost_connection_loses_no_reply() -> None:
    direct, shared, own = sender()
    await direct.send_surely(ANSWER, ADDRESS)
    shared.dies_by = "connection reset"
    await direct.send_surely(ANSWER, ADDRESS)
    assert own.sent == [ADDRESS, ADDRESS]


async def test_of_several_messages_to_a_new_address_only_the_first_is_tried_separately() -> None:
    direct, shared, own = sender()
    for _ in range(3):
        assert (await direct.write(ANSWER, ADDRESS, timeout_s=5)).done()
    assert (own.sent, shared.sent) == ([ADDRESS], [ADDRESS, ADDRESS])


async def test_an_address_is_tried_separately_again_after_a_message_to_it_was_not_confirmed() -> None:
    direct, shared, own = sender()
    await direct.send_surely(ANSWER, ADDRESS)
    shared.dies_by = "INTERNAL_ERROR"
    assert (await direct.write(ANSWER, ADDRESS, timeout_s=5)).exception()
    await asyncio.sleep(0)  # its callback
    await direct.send_surely(ANSWER, ADDRESS)
    assert own.sent == [ADDRESS, ADDRESS]
