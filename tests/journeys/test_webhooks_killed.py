"""A worker dies between a request's outcome, the publishing of its webhook, the post and the acknowledgement: another
one goes on, and the outcome is posted at least once, under the same webhook-id."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from consumers.settle import FAILPOINT_EXIT_CODE
from tests.support.brokers import Vhost
from tests.support.endpoint import endpoint
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.serving import HeldCalls
from tests.support.waiting import until

IDS = [f"killed-{at}" for at in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "posts_before"),
    [
        ("after_store", 0),
        ("after_webhook", None),
        ("after_confirm", None),
        ("after_ack", None),
        ("after_post", 1),
        ("after_repost", 1),
    ],
)
async def test_nothing_is_lost_where_a_worker_dies(
    vhost: Vhost, tmp_path: Path, place: str, posts_before: int | None
) -> None:
    async with HeldCalls() as api, endpoint() as hook, requester(vhost.amqp_url) as app:
        environ = environment(vhost, api, **hook.environment())
        if place == "after_repost":  # of the copy that comes back after a pause
            hook.answer = lambda posted: web.Response(status=500)
        dying = {**environ, "LANEKEEPER_FAILPOINTS": f"{place}:1"}
        async with lanekeeper("serve", environ=dying, folder=tmp_path) as first:
            await first.ready()
            asked = [
                await app.publish({"prompt": id}, message_id=id, headers={"x-lane-webhook": hook.url()}) for id in IDS
            ]
            assert await first.ended() == FAILPOINT_EXIT_CODE
        if posts_before is not None:
            assert (len(hook.posts) > 0) == (posts_before > 0)
        hook.answer = lambda posted: web.Response(status=204)
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as second:
            await second.ready()
            replies = await asyncio.gather(*(app.final(each) for each in asked))
            assert [reply.status for reply in replies] == ["ok"] * len(IDS)
            await until(lambda: {posted.id for posted in hook.posts} == set(IDS))
            await until(lambda: app.holds(0, "lane.webhooks"))
            bodies = {reply.headers["x-lane-request-id"]: reply.body for reply in replies}
            for posted in hook.posts:
                posted.verify()
                assert posted.body == bodies[posted.id]
