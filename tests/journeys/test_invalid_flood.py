"""A tenant's invalid messages do not fill the dead letters."""

from consumers.state.base import Identity
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_a_tenants_invalid_messages_are_all_answered_but_not_all_parked_and_other_tenants_are_not_affected(
    vhost: Vhost,
) -> None:
    async with serving(vhost.amqp_url, dead={"invalid_per_hour": 3}) as worker, requester(vhost.amqp_url) as app:
        ids = [f"r-{number}" for number in range(6)]
        codes = [(await app.ask(b"rubbish", user_id=vhost.user, message_id=id)).code for id in ids]
        assert codes == ["invalid_request"] * 6
        await until(lambda: app.holds(3, "lane.dead"))
        assert worker.parts.settler.parking.unparked == 3
        kept = [id for id in ids if await worker.parts.store.find(Identity(vhost.user, id)) is not None]
        assert kept == ids[:3], "nor does it fill the store"

        assert (await app.ask(b"rubbish")).code == "invalid_request"
        await until(lambda: app.holds(4, "lane.dead"))  # another tenant has a share of its own
        failed = await app.ask({"prompt": "[[fault: invalid]]"}, user_id=vhost.user)
        assert failed.code == "provider_rejected"
        await until(lambda: app.holds(5, "lane.dead"))  # a valid request that failed is always parked
