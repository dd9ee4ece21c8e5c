"""A story of four tenants, chosen at random once, with all that came of it: slots-of-tenants.txt.
To write it anew:

    .venv/bin/python -m tests.consumers.slots.test_story
"""

import asyncio
import random
from pathlib import Path

from consumers.slots.admission import LaneSlots, QueueSlots, TenantShare
from tests.support.virtual_time import virtually

PATH = Path(__file__).with_name("slots-of-tenants.txt")
TENANTS = ("shop", "search", "crm", "tools")


def slots_of_tenants() -> list[str]:
    """Four tenants take and give back the slots of two queues."""
    chosen, lines = random.Random("turns"), []

    async def story() -> None:
        shares = {"shop": TenantShare(weight=2), "tools": TenantShare(in_flight=2), "*": TenantShare()}
        turns = LaneSlots(shares, lambda tenant: tenant in ("crm", "tools"))
        benches = [turns.queue(4), turns.queue(2)]
        held: list[tuple[QueueSlots, str]] = []
        tasks: list[asyncio.Task[None]] = []

        async def ask(number: int, at: int, tenant: str) -> None:
            bench = benches[at]
            rank, movable, is_head = chosen.choice((0, 0, 5)), chosen.random() < 0.5, chosen.random() < 0.2
            if bench.begin(tenant):
                lines.append(f"{number} {tenant} begins at once in {at}")
            else:
                turn = await bench.wait(tenant, rank=rank, movable=movable, is_head=is_head)
                lines.append(f"{number} {tenant} is told in {at}: {turn.name}, at {_now_s()}")
                if turn.name == "ASIDE":
                    bench.lane.figures(tenant).set_aside += 1
                    return
            held.append((bench, tenant))

        for number in range(200):
            what, tenant, at = chosen.random(), chosen.choice(TENANTS), chosen.choice((0, 0, 1))
            if what < 0.55:
                tasks.append(asyncio.ensure_future(ask(number, at, tenant)))
            elif what < 0.85 and held:
                bench, tenant = held.pop(chosen.randrange(len(held)))
                bench.end(tenant)
                lines.append(f"{number} {tenant} ends in {benches.index(bench)}")
            elif what < 0.88:
                benches[at].resize(chosen.choice((1, 3, 5)))
            elif what < 0.92:
                benches[at].set_surplus_aside(chosen.random() < 0.5)
            elif what < 0.95 and tasks:
                chosen.choice(tasks).cancel()
            await asyncio.sleep(chosen.choice((0, 0, 1, 20)))
            lines.append(f"{[(each.running, each.waiting, each.is_full, each.begun) for each in benches]}")
            if not number % 10:
                lines.append(f"{turns.snapshot()} {turns.in_hand} {turns.is_shared}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(700)
        lines.append(f"{turns.is_shared} {turns.snapshot()}")

    virtually(story())
    return lines


def _now_s() -> str:
    return f"{asyncio.get_running_loop().time() - 1000:.3f}"


def test_a_story_comes_out_as_it_did() -> None:
    assert slots_of_tenants() == PATH.read_text().splitlines()


if __name__ == "__main__":
    PATH.write_text("\n".join(slots_of_tenants()) + "\n")
