"""Handles the messages in the queue `lane.fallen`: those that the broker dead-lettered from one of Lanekeeper's queues,
or could not route, and those that a worker found in a queue where they do not belong (`Settler.publish_stray`).

Such a message is a request that has failed: its requester gets an error and, depending on the error, the request is
kept in `lane.dead`."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from consumers.clock import NowMs, now_ms
from consumers.job import Job, Source, source_of
from consumers.outcomes import Deferred, Outcome, Refused, end_with
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from topology.broker.consume import Delivery
from topology.codec.headers import KEEPS
from topology.lanes import LaneSpec


class Strays:
    """Finds the outcome of each message in the queue `lane.fallen`, which the broker has dead-lettered or could not
    route."""

    def __init__(
        self, lanes: Sequence[LaneSpec], *, names: Names, now_ms: NowMs = now_ms, speakers: Collection[str] = ()
    ) -> None:
        self._lanes = {lane.name: lane for lane in lanes}
        self._lane_by_intake = {names.intake(lane.name): lane for lane in lanes}
        self._names = names
        self._now_ms = now_ms
        self._speakers = speakers

    def job_of(self, delivery: Delivery) -> Job:
        message = delivery.message
        if message.exchange == "":
            _read_stray(message)
        # the header x-death of a message that was not dead-lettered may be written by its publisher
        death = _death(message) if message.exchange == self._names.strays else {}
        queue = str(death.get("queue"))
        is_a_workers = self._names.lane_behind(queue) or _is_ended(message)
        source = Source.DELAY if is_a_workers else source_of(message, self._names)
        lane = self._lane_by_intake.get(queue)
        if source is not Source.REQUESTER:
            lane = self._lanes.get(message.routing_key.partition(".")[0])
        job = Job(delivery, lane=lane, source=source, taken_ms=self._now_ms(), speakers=self._speakers)
        if death.get("reason") == "delivery_limit":
            job.hop = replace(job.hop, redelivered=True)  # the worker that holds its claim has died
        return job

    async def handle(self, job: Job) -> Outcome:
        message = job.message
        if job.hop.flow is not None and job.hop.flow.role == KEEPS:  # the message that looks is the request
            return Refused(RequestProblem("superseded", "it kept the state of a pipeline"), is_silent=True)
        # back from a delay, and its lane was removed meanwhile
        is_removed = job.source is Source.DELAY and job.lane is None and message.exchange != self._names.strays
        if message.exchange == self._names.requests or is_removed:
            known = ", ".join(sorted(self._lanes))
            return end_with(
                "unroutable", f"no lane for routing key {message.routing_key[:120]!r}: it begins with one of {known}"
            )
        if _is_ended(message):
            return end_with(message.headers[n.DEAD_CODE], message.headers[n.DEAD_DETAIL])
        if message.exchange == "":
            return end_with("internal", "a worker found it in a queue where it does not belong, or failed to handle it")
        death = _death(message)
        queue, reason = death.get("queue"), death.get("reason")
        if message.exchange == self._names.strays and reason == "expired":
            bound = job.hop.expiration or death.get("original-expiration")
            return end_with(
                "deadline_exceeded", f"expired in {queue}" + (f" after its expiration of {bound} ms" if bound else "")
            )
        if message.exchange == self._names.strays and reason == "delivery_limit":
            if job.lane is not None and not job.deaths:
                # The broker also counts deliveries that only waited in workers which others killed. Under what kills
                # them itself they go on dying, and it comes here again.
                job.died = True
                return Deferred(delay_ms=0, reason="redelivered", redelivered=True)
            return end_with("poison", f"delivered from {queue} again and again, and never settled")
        return end_with("internal", f"fell out of exchange {message.exchange!r}, queue {queue!r}, reason {reason!r}")


def _read_stray(message: Message) -> None:
    """Give a message that a worker moved here its routing key and its user again. Only workers, and the broker, may
    publish through the default exchange."""
    key, user = message.headers.get(n.ROUTING_KEY), message.headers.get(n.USER_ID)
    message.routing_key = key if isinstance(key, str) else ""
    message.user_id = user if isinstance(user, str) else None


def _is_ended(message: Message) -> bool:
    """Whether a worker has moved it here with an error (`Settler.end_too_large`)."""
    return message.exchange == "" and n.DEAD_CODE in message.headers


def _death(message: Message) -> dict[str, Any]:
    deaths = message.headers.get(n.DEATH)
    first = deaths[0] if isinstance(deaths, list) and deaths else None
    return first if isinstance(first, dict) else {}
