"""Spends a shared budget as fast as possible: `python -m tests.support.spender URL NAMESPACE SECONDS`.

It prints the time and lane of each grant as JSON: `[[seconds since 1970, lane], …]`.
"""

import asyncio
import json
import sys
import time

from consumers.limits.base import Amounts, BucketHeaders, Feedback, Kind, RateHeaders
from consumers.state.redis.client import RedisClient
from consumers.state.redis.shared_budget import shared_budgets
from tests.support.budget import ACCOUNT, spec

LANES = ("critical", "normal", "batch", "batch")
PER_MINUTE = 1200
BURST_S = 1.0


async def main(url: str, namespace: str, seconds: float) -> None:
    client = RedisClient(url)
    budgets = shared_budgets(client, namespace=namespace, spec=spec(requests=PER_MINUTE, burst_s=BURST_S))
    granted: list[tuple[float, str]] = []

    async def worker(lane: str) -> None:
        while True:
            reservation = await budgets.reserve(ACCOUNT, lane=lane, amounts=Amounts(1, 10, 10), until=None)
            granted.append((time.time(), lane))
            await asyncio.sleep(0.05)
            told = BucketHeaders(
                limit=PER_MINUTE + len(granted) % 2
            )  # alternates, so that every answer tells something new
            budgets.learn(
                ACCOUNT, Feedback(kind=Kind.ANSWERED, rate=RateHeaders(told, BucketHeaders(), BucketHeaders()))
            )
            budgets.settle(reservation, Amounts(1, 10, 5))

    workers = [asyncio.ensure_future(worker(lane)) for lane in LANES * 2]
    await asyncio.sleep(seconds)
    for each in workers:
        each.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await budgets.aclose()
    await client.aclose()
    print(json.dumps(granted))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
