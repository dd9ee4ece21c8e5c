"""The plan of the suite: which scenarios run, with which contestants, how often, and how large."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from suite.contestants import FLOOR, PEERS, Contestant, floor_with_lanes, lanekeeper
from suite.scenarios import Figures, drain, few_callers, first_part, flood, memory, mixed, publish, rpc
from suite.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario of the plan."""

    name: str
    run: Callable[[Stage, Contestant], Awaitable[Figures]]
    contestants: Sequence[Contestant]
    rounds: int

    def only(self, names: Sequence[str]) -> "Scenario":
        """The scenario with only these contestants."""
        return replace(self, contestants=[who for who in self.contestants if who.name in names])


def plan(*, quick: bool) -> list[Scenario]:
    """The whole suite, in the order in which it runs."""
    ours = lanekeeper()
    everybody, pair = (FLOOR, ours, *PEERS), (FLOOR, ours)
    variants = (lanekeeper("no store", module="suite.storeless"), _traced())
    rounds, requests = (1, 800) if quick else (3, 3000)

    def drains(name: str, contestants: Sequence[Contestant], rounds: int, **how: int) -> Scenario:
        def run(stage: Stage, who: Contestant) -> Awaitable[Figures]:
            return drain(stage, who, **{"requests": requests, **how})

        return Scenario(name=name, run=run, contestants=contestants, rounds=rounds)

    def scenario(
        name: str, run: Callable[..., Awaitable[Figures]], contestants: Sequence[Contestant], rounds: int, **how: float
    ) -> Scenario:
        return Scenario(
            name=name, run=lambda stage, who: run(stage, who, **how), contestants=contestants, rounds=rounds
        )

    depths = (1000,) if quick else (1000, 2000, 10_000, 100_000)
    return [
        drains("drain", (FLOOR, ours, *variants, *PEERS), rounds),
        scenario("publish", publish, everybody, rounds, requests=1000 if quick else 5000),
        scenario("rpc", rpc, everybody, rounds, alone=100, callers=400, idle=3)
        if quick
        else scenario("rpc", rpc, everybody, rounds, alone=300, callers=1500, idle=7),
        *(
            scenario(
                f"flood {jobs}",
                flood,
                (floor_with_lanes(critical=1, batch=7), _lanes(critical=1, batch=7), *(PEERS if jobs == 2000 else ())),
                1 if quick else 2,
                jobs=jobs,
                asks=30 if quick else 100,
            )
            for jobs in depths
        ),
        scenario(
            "mixed",
            mixed,
            (floor_with_lanes(critical=3, normal=2, batch=3), _lanes(critical=3, normal=2, batch=3)),
            1 if quick else 2,
            seconds=3 if quick else 8,
        ),
        scenario("first part", first_part, pair, rounds, requests=40 if quick else 150),
        *(
            drains(f"{count} processes", pair, 1 if quick else 2, processes=count)
            for count in ((2,) if quick else (2, 4))
        ),
        scenario("10 in the queue", few_callers, pair, 1, requests=300 if quick else 1500),
        *(drains(f"{count} tenants", (ours,), 1, tenants=count) for count in ((20,) if quick else (20, 200))),
        *(
            drains(f"{size // 1000} KB bodies", pair, 1, size=size, requests=(min(requests, 30_000_000 // size)))
            for size in ((1_000_000,) if quick else (32_000, 256_000, 1_000_000))
        ),
        scenario("memory", memory, (ours,), 1 if quick else 2, requests=3000 if quick else 100_000),
    ]


def _lanes(**slots: int) -> Contestant:
    """Lanekeeper with only these lanes, and as many slots in total as the floor. Lanes lend their idle slots, but
    critical never lends its last one."""
    own = {f"LANEKEEPER_LANES__{lane.upper()}__SLOTS": str(count) for lane, count in slots.items()}
    kept = {f"LANEKEEPER_LANES__{lane.upper()}__SLOTS_MIN": str(int(lane == "critical")) for lane in slots}
    return lanekeeper(lanes=tuple(slots), **own, **kept)


def _traced() -> Contestant:
    """Lanekeeper with traces: spans of every tenth request are sent to the provider's process, which drops them."""
    return lanekeeper(
        "traces at 10 %",
        OTEL_EXPORTER_OTLP_ENDPOINT="BASE_URL",
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG="0.1",
    )
