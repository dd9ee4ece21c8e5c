"""Two contestants in turns, round by round: what a request costs the one, as a ratio to the other."""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import ground
import uvloop

from lanekeeper.amqp.connection import Connection
from suite.contestants import Contestant, Floor, Lanekeeper, Place
from suite.drain import Drained, Spoiled, drain
from suite.processes import provider


async def run(contestants: list[Contestant], *, rounds: int, requests: int, slots: int) -> None:
    first, *others = contestants
    found: dict[str, list[Drained]] = {each.name: [] for each in contestants}
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as folder:
        async with (
            ground.broker() as url,
            Connection(url, name="benchmark") as connection,
            provider(Path(folder), most=requests) as (base_url, books),
        ):
            print(f"RabbitMQ {connection.version}, {requests} requests a round, {slots} slots", flush=True)
            for number in range(rounds):
                for who in contestants:
                    own = Path(folder, f"{who.name}-{number}")
                    own.mkdir()
                    place = Place(amqp_url=url, base_url=base_url, folder=own, slots=slots)
                    found[who.name].append(await drain(who, connection, books, place, requests=requests))
                said = "   ".join(_text(each.name, found[each.name][-1]) for each in contestants)
                ratio = found[others[-1].name][-1].cpu_ms / found[first.name][-1].cpu_ms
                print(f"  {said}   CPU x {ratio:.2f}", flush=True)
    for each in contestants:
        print(_text(each.name, _median(found[each.name])))
    for other in others:
        pairs = list(zip(found[first.name], found[other.name], strict=True))
        cpu = [its.cpu_ms / base.cpu_ms for base, its in pairs]
        rate = [its.per_s / base.per_s for base, its in pairs]
        print(
            f"{other.name} to {first.name}: CPU a request x {statistics.median(cpu):.2f} "
            f"({min(cpu):.2f} to {max(cpu):.2f}), drain x {statistics.median(rate):.2f} "
            f"({min(rate):.2f} to {max(rate):.2f})"
        )


def _text(name: str, drained: Drained) -> str:
    return f"{name:<12} {drained.per_s:6.0f}/s {drained.cpu_ms:6.3f} CPU-ms"


def _median(rounds: list[Drained]) -> Drained:
    return Drained(
        per_s=statistics.median(each.per_s for each in rounds),
        cpu_ms=statistics.median(each.cpu_ms for each in rounds),
    )


def main(about: str | None) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--slots", type=int, default=50)
    parser.add_argument(
        "--against", type=Path, action="append", default=[], help="another checkout, set up; repeatable"
    )
    options = parser.parse_args()
    trees = [Lanekeeper(path.name, code=path.resolve()) for path in options.against]
    contestants: list[Contestant] = [Floor(), *trees, Lanekeeper()]
    try:
        uvloop.run(run(contestants, rounds=options.rounds, requests=options.requests, slots=options.slots))
    except Spoiled as spoiled:
        sys.exit(f"no figure: {spoiled}")
