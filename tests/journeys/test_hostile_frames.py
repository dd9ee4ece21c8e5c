"""Malformed AMQP frames affect nobody but their sender."""

from contextlib import suppress

import pytest
from aiormq.exceptions import AMQPError

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving

pytestmark = pytest.mark.oldest_version

FLAGS = {
    "flags that go on, and end": b"\x00\x01",
    "flags that go on for ever": b"\x00\x01" * 200,
    "a second word of flags": b"\x00\x01\x80\x00",
    "flags that nobody knows": b"\x00\x02",
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
async def test_property_flags_that_no_client_sends_close_at_most_the_senders_connection(
    vhost: Vhost, flags: bytes
) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        with suppress(AMQPError):
            async with requester(vhost.amqp_url) as hostile:
                await hostile.publish_raw(b'{"prompt": "odd"}', key=b"critical.tests.odd", properties=flags)
        assert (await app.ask({"prompt": "a good one"})).status == "ok"
        assert worker.is_well
