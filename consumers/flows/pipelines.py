"""Pipelines: requests that run several steps, one after the other, as a routing slip.

The request's message carries the state: its input, and the outputs of the steps that have ended. Each step is worked on
as an attempt of the request, under the request's claim, and its outcome is stored under an id of its own
(`PipelinePosition`) before the message goes on to the next step (`settle.py`). So a crash repeats a publish, and never
a call whose outcome is stored: a step that ran before is answered from the store.

A step with `each` publishes a message for each item of a list to a side queue of its lane, so that the items use the
slots of the lane's intake. The request's own message then goes round the delay cascade, and each time looks in the
store for the items' outcomes, until it has all. If its state is large, it goes round without it (`LOOKS`): the state is
in the store, and in a second message (`KEEPS`), which goes round seldom and stores it again if the store has lost it.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

import jiter

from consumers.claiming import Claiming
from consumers.clock import NowMs, moment_ms, moment_text, now_ms
from consumers.flows.handlers import PROVIDER as HANDLER
from consumers.flows.rendering import Filled, Order, Rendering, RenderingUnavailable
from consumers.job import Chain, Decoded, Job, PipelinePosition, content_hash, state_identity
from consumers.outcomes import (
    LATER_MS,
    Answered,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    end_with,
    end_with_problem,
    stopped_by,
)
from consumers.spending import EVERY_TENANT
from consumers.state.base import UNIT_BYTES, WHICH_LIMIT, Completion, Ending, Found, Identity, WaitingLimit
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.amqp.tolerant import KEY_BYTES
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS, MessageTooLarge, PublishRefused, RequestProblem
from topology.codec.decoding import UNPACKED_BYTES, Request, state_of
from topology.codec.headers import KEEPS, LOOKS, FlowHop, HopHeaders, hop_headers
from topology.delays import hop
from topology.lanes import MIB, LaneSpec

INPUT: Final = "input"
ITEM: Final = "item"
NUMBER: Final = "number"
ITEMS_AT_MOST: Final = 10_000
AT_ONCE: Final = 64
"""How many items are published, or looked for, at the same time; and after how many that have no outcome yet the others
are not looked for, because the items of a list begin in order."""
BYTES_AT_ONCE: Final = 4 * MIB
"""So much of what items have answered is in memory at a time, unless one is larger."""
LEAST_WAIT_MS: Final = 100
LONGEST_WAIT_MS: Final = 30_000
SPLIT_BYTES: Final = 32 * 1024
"""A larger state does not go round with each look."""
ADMITTED_MS: Final = 10_000
"""For so long a pipeline counts among those that wait, from its first delivery on."""
KEEPER_MS: Final = 51_200
LONGEST_KEEPER_MS: Final = 8 * KEEPER_MS
AGAIN_TIMES: Final = 2
"""How often the items of a fan-out may be published again because the store has lost them, on average."""
PUBLISH_WITHIN_S: Final = 60.0
"""For so long one delivery publishes items; the next one goes on."""
FILL_IN_WITHIN_S: Final = 15.0
"""For so long a delivery waits for its templates, which others' may go before; then it comes later."""
ROOM_WITHIN_S: Final = 30.0
"""For so long a delivery waits until this process may hold the items' outcomes; then it comes later."""
FULL_MS: Final = 1000
LONGEST_FULL_MS: Final = 10_000
"""After how long at least and at most the items that found their queue full are published."""
PROVIDER: Final = "pipeline"
"""The header `x-lane-provider` if the last step is a list of answers."""


OnFailure = Literal["fail", "skip", "keep"]
"""What becomes of a fan-out of which an item failed: it fails; the item is left out; its problem document stands for
its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """The settings of one step: a prompt for a model, or a handler. Empty values stand for the lane's."""

    name: str
    prompt: str = ""
    handler: str = ""
    lane: str = ""
    model: str = ""
    max_tokens: int | None = None
    each: str = ""
    on_failure: OnFailure = "fail"


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """The settings of one pipeline."""

    name: str
    steps: tuple[StepSpec, ...]
    tenants: tuple[str, ...] = ()
    """The tenants that may run it although it uses lanes other than that of their request; EVERY_TENANT: all."""

    def uses(self, lane: LaneSpec, lanes: Mapping[str, LaneSpec]) -> Iterator[tuple[LaneSpec, str]]:
        """The lane of each step for a request of this `lane`, and its model; empty: it has a handler."""
        for step in self.steps:
            of = lanes[step.lane] if step.lane else lane
            yield of, "" if step.handler else step.model or of.model


@dataclass(frozen=True, slots=True)
class _Step:
    spec: StepSpec
    number: int
    before: str
    """The name of the step before; the input for the first one."""


class _Look(NamedTuple):
    """What the store knows of a fan-out's items from the first one without an outcome on."""

    done: int
    """So many items from the first on have an outcome."""
    ended: int
    """So many have one in all, as far as it was looked."""
    again: list[int]
    """Those that must be published again."""
    failed: int | None
    """The first that failed."""


@dataclass(slots=True, kw_only=True)
class Pipelines:
    """The pipelines of a worker. `lanes`: all, also those that this worker does not consume."""

    specs: Sequence[PipelineSpec]
    lanes: Mapping[str, LaneSpec]
    claiming: Claiming
    publisher: Publisher
    names: Names
    rendering: Rendering
    chain_of: Callable[[str, str, str], Chain]
    reach_soon: Callable[[str], None]
    """`Failpoints.reach_soon`"""
    needs_rights: bool = False
    """Whether a request's user needs a right for the lanes of its pipeline's steps. For its own lane the broker has
    checked it."""
    trusted: Collection[str] = ()
    """Users that need none: they speak for others, whose rights they have checked, or are the workers' own."""
    now_ms: NowMs = now_ms
    _steps: dict[str, dict[str, _Step]] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = {spec.name: steps_of(spec) for spec in self.specs}

    async def arrive(self, job: Job, decoded: Decoded) -> Outcome | None:
        """The first gate, before the claim: checks what a request that begins may, and how many wait; and ends here the
        deliveries of the message that keeps a pipeline's state. Raises StoreUnavailable."""
        flow = job.hop.flow
        if flow is None:
            return await self._begin(job, decoded) if decoded.request.pipeline and job.hop.is_fresh else None
        return await self._keep(job, flow) if flow.role == KEEPS else None

    async def _begin(self, job: Job, decoded: Decoded) -> Outcome | None:
        spec = next(spec for spec in self.specs if spec.name == decoded.request.pipeline)
        if (refused := self._refused(job, spec, decoded.lane)) is not None:
            return refused
        if not any(step.each for step in spec.steps):
            return None
        limit = await self._count(job, len(decoded.request.body), ADMITTED_MS)
        if limit is WaitingLimit.WITHIN or await self.claiming.has_ended(job):
            return None
        detail = f"{WHICH_LIMIT[limit]}: wait until some of its pipelines or delayed requests have ended"
        return Refused(RequestProblem("too_many_waiting", detail), is_silent=await self.claiming.is_known(job))

    def _refused(self, job: Job, spec: PipelineSpec, lane: LaneSpec) -> Outcome | None:
        user, tenant = job.hop.user_id, job.identity.tenant
        needs_right = self.needs_rights and user not in self.trusted
        is_granted = tenant in spec.tenants or EVERY_TENANT in spec.tenants
        after_lane = job.routing_key.partition(".")[2].encode()
        for of, model in spec.uses(lane, self.lanes):
            if len(of.name) + 1 + len(after_lane) > KEY_BYTES:
                return end_with(
                    "invalid_request",
                    f"routing key: too long for a step of pipeline {spec.name} in lane {of.name}, where it begins with "
                    f"{of.name}: allowed are {KEY_BYTES} bytes",
                )
            if needs_right and not is_granted and of.name != lane.name:
                return end_with(
                    "invalid_request",
                    f"header {n.PIPELINE}: {spec.name} has a step in lane {of.name}, so tenant {tenant[:80]!r} may run "
                    f"it only if pipelines.{spec.name}.tenants lists it",
                )
            if model and of.models is not None and model not in of.models:
                return end_with(
                    "forbidden_model", f"pipeline {spec.name}: model {model!r} is not allowed in lane {of.name}"
                )
        return None

    async def _count(self, job: Job, size: int, for_ms: int) -> WaitingLimit:
        """Count what waits in the broker for so long."""
        weight, until_ms = 1 + size // UNIT_BYTES, self.now_ms() + for_ms
        return await self.claiming.reserve(job, weight=weight, until_ms=until_ms)

    async def _keep(self, job: Job, flow: FlowHop) -> Outcome:
        kept = state_identity(job.identity, flow)
        request, state = await self.claiming.endings([job.identity, kept])
        is_there = state is not None and state.size > 0
        left_ms = flow.deadline_ms - self.now_ms()
        was_emptied = state is not None and not is_there  # when the request ended, which the store may have forgotten
        is_over = request is not None and request.is_over
        if left_ms <= 0 or was_emptied or is_over:
            # what it came to may have still to be put into `lane.dead`, for which the state is needed
            is_parked = request is not None and request.code != "" and PROBLEMS[request.code].parked
            if is_over and is_there != is_parked:
                body = job.message.body if is_parked else b""
                await self.claiming.keep_state(kept, body, deadline_ms=flow.deadline_ms)
            return Refused(RequestProblem("superseded", "its pipeline has ended"), is_silent=True)
        if not is_there:
            await self.claiming.keep_state(kept, job.message.body, deadline_ms=flow.deadline_ms)
        delay_ms = min(left_ms, _keeper_ms(self.now_ms() - flow.since_ms))
        await self._count(job, len(job.message.body), delay_ms)
        return Deferred(delay_ms=delay_ms, reason="keeps the state")

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """The gate of pipelines: makes the request of the step at which a pipeline stands; or, without an attempt, goes
        on to another lane, publishes a fan-out's items or joins their outcomes. Raises StoreUnavailable, BrokerError.
        """
        flow = job.hop.flow
        if flow is not None and flow.item_of:
            return await self._enter_item(job, flow)
        if not decoded.request.pipeline:
            return None
        steps = self._steps[decoded.request.pipeline]
        name = next(iter(steps)) if flow is None else flow.step
        if (step := steps.get(name)) is None:
            return end_with("internal", f"pipeline {decoded.request.pipeline} has no step {name[:80]!r} any more")
        try:
            return await self._enter_step(job, decoded, steps, step)
        except RequestProblem as problem:
            return end_with_problem(problem)
        except RenderingUnavailable:
            if job.stopped is not None:
                return stopped_by(job.stopped, doing=f"was at step {step.spec.name}")
            return Deferred(delay_ms=LATER_MS, reason="templates")

    async def _enter_item(self, job: Job, flow: FlowHop) -> Outcome | None:
        (found,) = await self.claiming.endings([Identity(job.identity.tenant, flow.item_of)])
        if found is not None and found.is_over:
            return Refused(RequestProblem("cancelled", "its pipeline has ended"))
        return None

    async def _enter_step(self, job: Job, decoded: Decoded, steps: Mapping[str, _Step], step: _Step) -> Outcome | None:
        flow, body = job.hop.flow, decoded.request.body
        if flow is not None and flow.role == LOOKS:
            body = job.message.body  # empty until it is needed
        state = state_of(body) if flow is None or not flow.input_bytes else body
        first = flow or FlowHop(
            step=step.spec.name,
            deadline_ms=decoded.request.deadline_ms,
            body_hash=job.fingerprint.body_hash.hex(),
            digest=content_hash(body).hex()[:8],
            input_bytes=len(body),
            routing_key=job.routing_key,
        )
        job.standing = PipelinePosition(
            step=step.spec.name, flow=first, state=state, following=_name_after(steps, step)
        )
        lane = step.spec.lane or first.routing_key.partition(".")[0]
        if lane != job.lane_name and not step.spec.each:
            return self._moved(job, lane)
        if step.spec.each and flow is not None and 0 < flow.of <= flow.items:
            return await self._wait(job, step, lane)
        if not step.spec.each and (before := await self._before(job)) is not None:
            if job.standing.following is not None:
                return self._stepped(job, output_of(before.body, step.spec), None)
            return Answered(
                body=before.body,
                model=str(before.headers.get(n.MODEL, "")),
                provider=str(before.headers.get(n.PROVIDER, "")),
            )
        if not await self._has_state(job):
            return await self._round(job, job.standing.flow, KEEPER_MS)
        if step.spec.each:
            return await self._fan_out(job, step, lane)
        filled = await self._fill_in(job, step)
        request = self._request(decoded.request, step, decoded.lane, filled.texts[0])
        chain = Chain() if request.handler else self.chain_of(lane, job.identity.tenant, request.model)
        job.decoded = Decoded(request, decoded.lane, chain)
        return None

    async def _has_state(self, job: Job) -> bool:
        """Whether the state is here; of a message that goes round without it, whether the store has it."""
        assert job.standing is not None
        if not job.standing.state:
            job.message.body = await self.claiming.state(state_identity(job.identity, job.standing.flow))
            job.standing = replace(job.standing, state=job.message.body)
            job.delivery.count(len(job.message.body))
        return job.standing.state != b""

    async def _has_room(self, job: Job, size: int) -> bool:
        async with job.interruptible(ROOM_WITHIN_S):
            await job.delivery.room(min(size, UNPACKED_BYTES))
            return True
        return False

    async def _before(self, job: Job) -> Completion | None:
        """The stored outcome of the step, if it ran before."""
        assert job.standing is not None
        found = await self.claiming.find(job.standing.identity(job.identity))
        return (
            None if found is None or found.completion is None or found.completion.status != "ok" else found.completion
        )

    async def _fill_in(self, job: Job, step: _Step, numbers: Sequence[int] = ()) -> Filled:
        """What a step asks, or the first of a fan-out's items with these numbers. Raises RequestProblem,
        RenderingUnavailable."""
        assert job.decoded is not None
        assert job.standing is not None
        spec = step.spec
        value = "" if spec.prompt else ITEM if spec.each else step.before
        order = Order(prompt=spec.prompt, value=value, each=spec.each, numbers=numbers)
        async with job.interruptible(FILL_IN_WITHIN_S):
            return await self.rendering.fill_in(
                order, job.standing.state, rank=job.decoded.lane.rank, tenant=job.identity.tenant
            )
        raise RenderingUnavailable("not in time, or its request was stopped")

    def _request(self, request: Request, step: _Step, lane: LaneSpec, text: bytes) -> Request:
        """The request of a step, or of an item, that asks this."""
        spec = step.spec
        if spec.handler:
            return replace(request, body=text, handler=spec.handler, model=spec.handler, states_stream=False)
        model, max_tokens = spec.model or lane.model, spec.max_tokens or lane.max_tokens
        asked = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": text.decode()}]}
        body = json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        return replace(request, body=body, model=model, max_tokens=max_tokens, states_stream=False)

    # ---- a step that has ended ---------------------------------------------------------------------------------------

    def after(self, job: Job, outcome: Outcome) -> Outcome:
        """The outcome of a delivery: that of its step, if it is the last one; else the pipeline goes on. An error names
        its step."""
        flow = job.hop.flow
        step = job.standing.step if job.standing is not None else "" if flow is None or flow.item_of else flow.step
        if not step:
            return outcome
        if isinstance(outcome, Answered) and job.standing is not None and job.standing.following is not None:
            try:
                output = output_of(outcome.body, None, is_handler=outcome.provider == HANDLER)
                return self._stepped(job, output, outcome)
            except RequestProblem as too_large:
                outcome = end_with_problem(too_large)
        if isinstance(outcome, (Refused, DeadLettered)) and not (isinstance(outcome, Refused) and outcome.is_silent):
            problem = outcome.problem
            if not problem.detail.startswith("step "):
                named = RequestProblem(
                    problem.code,
                    f"step {step}: {problem.detail}",
                    status=problem.status,
                    brief=f"step {step}: {problem.brief}",
                )
                return replace(outcome, problem=named)
        return outcome

    def _stepped(self, job: Job, output: bytes, answer: Answered | None) -> PipelineAdvanced:
        """The pipeline goes on to its next step. Raises RequestProblem if its state grows too large."""
        standing = job.standing
        assert standing is not None
        assert standing.following is not None
        state = with_output(standing.state, standing.step, output)
        following = self._lane_of(job, standing.following)
        flow = replace(standing.flow, step=standing.following, items=0, done=0, since_ms=0, of=0, again=0, role="")
        return PipelineAdvanced(flow=flow, state=state, lane=following, step=standing.step, answer=answer)

    def _moved(self, job: Job, lane: str) -> PipelineAdvanced:
        standing = job.standing
        assert standing is not None
        return PipelineAdvanced(flow=standing.flow, state=standing.state, lane=lane, step=standing.step)

    async def _round(self, job: Job, flow: FlowHop, delay_ms: int, *, ended: int | None = None) -> PipelineAdvanced:
        """The message of a fan-out goes round, for so long. `ended`: how many of its items have, if others than those
        of `FlowHop.done`. Raises StoreUnavailable."""
        standing = job.standing
        assert standing is not None
        state, keeper_ms = standing.state, 0
        if flow.role == LOOKS:
            state = b""
        elif len(state) > SPLIT_BYTES:
            await self.claiming.keep_state(state_identity(job.identity, flow), state, deadline_ms=flow.deadline_ms)
            keeper_ms = KEEPER_MS
        if delay_ms >= FULL_MS:
            await self._count(job, flow.of // AT_ONCE * UNIT_BYTES + len(state), max(delay_ms, keeper_ms))
        return PipelineAdvanced(
            flow=flow,
            state=state,
            lane=job.lane_name,
            step=standing.step,
            delay_ms=delay_ms,
            done=flow.done if ended is None else ended,
            of=flow.of,
            keeper_ms=keeper_ms,
        )

    def _lane_of(self, job: Job, step: str) -> str:
        assert job.decoded is not None
        assert job.standing is not None
        spec = self._steps[job.decoded.request.pipeline][step].spec
        return spec.lane or job.standing.flow.routing_key.partition(".")[0]

    # ---- fan-out and join --------------------------------------------------------------------------------------------

    async def _fan_out(self, job: Job, step: _Step, lane: str) -> Outcome:
        assert job.standing is not None
        count = (await self._fill_in(job, step)).items
        if count > ITEMS_AT_MOST:
            raise RequestProblem("too_large", f"each: {count} items, allowed are {ITEMS_AT_MOST}")
        flow = job.standing.flow
        goes_on = flow.since_ms != 0
        flow = replace(flow, since_ms=flow.since_ms or self.now_ms(), of=count)
        if not count:
            return await self._join(job, step, 0)
        if goes_on:
            await self._fail_with_its_items(job, step, await self._look(job, step, flow))
        clock = asyncio.get_running_loop().time
        until_s = clock() + PUBLISH_WITHIN_S
        asks = job.redelivered or job.hop.dead_at is not None
        while flow.items < flow.of:
            if job.stopped is not None:
                return stopped_by(job.stopped, doing=f"was at step {step.spec.name}")
            some = range(flow.items, min(flow.items + AT_ONCE, flow.of))
            found = await self._endings(job, some) if asks or goes_on else [None] * len(some)
            new = [(k, was) for k, was in zip(some, found, strict=True) if self._is_missing(job, was)]
            for part in (new[:1], new[1:]) if goes_on else (new,):  # one shows whether the queue is still full
                if not await self._publish(job, step, lane, part):
                    since_ms = self.now_ms() - flow.since_ms
                    return await self._round(job, flow, max(FULL_MS, min(LONGEST_FULL_MS, since_ms // 4)))
            flow, goes_on = replace(flow, items=some.stop), False
            if clock() >= until_s:
                break
        return await self._round(job, flow, LEAST_WAIT_MS)

    async def _wait(self, job: Job, step: _Step, lane: str) -> Outcome:
        """All items were published: join what they have come to, or look again later."""
        assert job.standing is not None
        flow = job.standing.flow
        look = await self._look(job, step, flow)
        needs_state = look.again or look.done == flow.of or (look.failed is not None and step.spec.on_failure == "fail")
        if needs_state and not await self._has_state(job):
            return await self._round(job, flow, KEEPER_MS)
        await self._fail_with_its_items(job, step, look)
        if look.done == flow.of:
            return await self._join(job, step, flow.of)
        if look.again:
            flow = replace(flow, again=flow.again + len(look.again))
            if flow.again > AGAIN_TIMES * flow.of:
                raise RequestProblem(
                    "internal", "the store loses what its items have come to: was it emptied, or is it too small?"
                )
            found = await self._endings(job, look.again)
            await self._publish(job, step, lane, list(zip(look.again, found, strict=True)))
        delay_ms = FULL_MS if look.again else _pause_ms(self.now_ms() - flow.since_ms, look.ended, flow.of)
        return await self._round(job, replace(flow, done=look.done), delay_ms, ended=look.ended)

    async def _fail_with_its_items(self, job: Job, step: _Step, look: _Look) -> None:
        """Raises RequestProblem if an item has failed, and the step fails with it."""
        if look.failed is None or step.spec.on_failure != "fail":
            return
        (found,) = await self._find(job, [look.failed])
        if found is not None and found.completion is not None and found.completion.status == "error":
            raise _item_failed(look.failed, found.completion)

    def _item(self, job: Job, step: _Step, lane: str, k: int, was: Ending | None, text: bytes) -> Message:
        """The message of one item."""
        assert job.decoded is not None
        assert job.standing is not None
        request = self._request(job.decoded.request, step, self.lanes[lane], text)
        at_ms = self.now_ms()
        past = None if was is None or was.status is None else moment_text(was.ended_ms)
        here = HopHeaders(
            first_seen_ms=at_ms,
            user_id=job.hop.user_id,
            dead_at=past,
            hop_ms=at_ms,
            back_ms=at_ms,
            is_fresh=True,
            flow=FlowHop(step=step.spec.name, deadline_ms=job.standing.flow.deadline_ms, item_of=job.id),
        )
        headers = hop_headers(here) | {
            name: value
            for name, value in job.message.headers.items()
            if name in n.TRACE_CONTEXT or name in (n.TENANT, n.KEY) or name.lower().startswith(n.ANTHROPIC)
        }
        if job.identity.tenant != (job.hop.user_id or ""):
            headers[n.TENANT] = job.identity.tenant
        return Message(
            body=request.body,
            headers=headers,
            content_type="application/json",
            message_id=f"{job.standing.identity(job.identity).id}.{k + 1}",
            priority=job.message.priority,
            type=request.handler or None,
            app_id=job.message.app_id,
        )

    async def _publish(self, job: Job, step: _Step, lane: str, items: Sequence[tuple[int, Ending | None]]) -> bool:
        """Publish these items, as many at a time as are filled in at once, and note each in the store: what the store
        does not know was not published, or the store has lost it. Returns whether all were published: False if their
        queue is full, or they are not filled in in time. Raises RequestProblem, RenderingUnavailable."""
        number = _side_of(job.identity.tenant, self.lanes[lane])
        while items:
            try:
                texts = (await self._fill_in(job, step, [k for k, _ in items])).texts
            except RenderingUnavailable:
                if job.stopped is not None:
                    raise
                return False
            if not texts:  # the settings have changed, and these are no items any more
                break
            some, items = items[: len(texts)], items[len(texts) :]
            messages = [self._item(job, step, lane, k, was, text) for (k, was), text in zip(some, texts, strict=True)]
            if not await self._publish_together(job, lane, number, messages):
                return False
        return True

    async def _publish_together(self, job: Job, lane: str, number: int | None, items: Sequence[Message]) -> bool:
        key = ".".join((lane, *job.routing_key.split(".")[1:]))
        assert job.standing is not None
        deadline_ms = job.standing.flow.deadline_ms

        async def one(item: Message) -> None:
            self.reach_soon("after_publish")
            if number is None:
                first = hop(0, self.names)
                item.headers = {**item.headers, **first.headers}
                await self.publisher.publish_surely(item, exchange=first.exchange, routing_key=key)
            else:
                exchange = self.names.side_exchange(number)
                await self.publisher.publish_surely(item, exchange=exchange, routing_key=key, refused_within_s=0)
            identity = Identity(job.identity.tenant, item.message_id or "")
            await self.claiming.expect(identity, deadline_ms=deadline_ms)

        ended_all = await asyncio.gather(*map(one, items), return_exceptions=True)
        errors = [error for error in ended_all if isinstance(error, BaseException)]
        for error in errors:
            if isinstance(error, MessageTooLarge):
                text = f"an item has {error.size} bytes, the broker takes {error.limit}"
                raise RequestProblem("too_large", text) from None
            if not isinstance(error, PublishRefused):
                raise error
        return not errors

    def _identities(self, job: Job, numbers: Sequence[int]) -> list[Identity]:
        assert job.standing is not None
        prefix = job.standing.identity(job.identity)
        return [Identity(prefix.tenant, f"{prefix.id}.{k + 1}") for k in numbers]

    async def _find(self, job: Job, numbers: Sequence[int]) -> list[Found | None]:
        return list(await asyncio.gather(*map(self.claiming.find, self._identities(job, numbers))))

    async def _endings(self, job: Job, numbers: Sequence[int]) -> Sequence[Ending | None]:
        return await self.claiming.endings(self._identities(job, numbers))

    def _is_missing(self, job: Job, end: Ending | None) -> bool:
        """Whether an item must be published (again): the store does not know it (any more); or it ended with an error
        in a run of the pipeline before this one, or because that one had ended."""
        if end is None:
            return True
        if end.status != "error":
            return False
        dead_ms = moment_ms(job.hop.dead_at)
        return end.code == "cancelled" or (dead_ms is not None and end.ended_ms <= dead_ms)

    async def _look(self, job: Job, step: _Step, flow: FlowHop) -> _Look:
        count = min(flow.of, flow.items)
        done = min(flow.done, count)
        ended_count, again, failed = done, list[int](), None
        waiting = 0
        for begin in range(done, count, AT_ONCE):
            some = range(begin, min(begin + AT_ONCE, count))
            for k, end in zip(some, await self._endings(job, some), strict=True):
                if end is None or _is_left(end, flow):
                    again.append(k)
                    waiting += 1
                elif end.status is None or self._is_missing(job, end):
                    waiting += 1
                else:
                    done += done == k
                    ended_count += 1
                    if end.status == "error" and failed is None:
                        failed = k
            if waiting >= AT_ONCE:
                break
        return _Look(done, ended_count, again, failed)

    async def _join(self, job: Job, step: _Step, count: int) -> Outcome:
        """All items have ended: their outputs, in order, are the step's. Outcomes are fetched when there is room for
        them, a few at a time."""
        pieces, size = list[bytes](), 0
        assert job.standing is not None
        wanted: list[tuple[int, int]] = []
        for begin in range(0, count, AT_ONCE):
            some = range(begin, min(begin + AT_ONCE, count))
            for k, end in zip(some, await self._endings(job, some), strict=True):
                if end is None or end.status is None:  # the store has lost it since
                    return await self._round(job, replace(job.standing.flow, done=0), LEAST_WAIT_MS)
                if end.status == "ok" or step.spec.on_failure != "skip":
                    wanted.append((k, end.size))
        if not await self._has_room(job, sum(size for _, size in wanted)):
            if job.stopped is not None:
                return stopped_by(job.stopped, doing=f"was at step {step.spec.name}")
            return await self._round(job, job.standing.flow, FULL_MS)
        for numbers in _together(wanted):
            for found in await self._find(job, numbers):
                if found is None or (came := found.completion) is None:
                    return await self._round(job, replace(job.standing.flow, done=0), LEAST_WAIT_MS)
                pieces.append(came.body if came.status == "error" else output_of(came.body, step.spec))
                size += len(pieces[-1]) + 1
                if size > UNPACKED_BYTES:
                    raise _too_large(size)
        output = b"[" + b",".join(pieces) + b"]"
        if job.standing.following is None:
            model = step.spec.handler or step.spec.model or self.lanes[self._lane_of(job, step.spec.name)].model
            return Answered(body=output, model=model, provider=PROVIDER)
        return self._stepped(job, output, None)


def steps_of(spec: PipelineSpec) -> dict[str, _Step]:
    """The steps of a pipeline by name, in order."""
    found: dict[str, _Step] = {}
    before = INPUT
    for number, step in enumerate(spec.steps):
        found[step.name] = _Step(step, number, before)
        before = step.name
    return found


def _name_after(steps: Mapping[str, _Step], step: _Step) -> str | None:
    return next((name for name, other in steps.items() if other.number == step.number + 1), None)


def with_output(state: bytes, step: str, output: bytes) -> bytes:
    """The state with the output of one more step. Raises RequestProblem if it grows too large."""
    size = len(state) + len(step) + len(output) + 8
    if size > UNPACKED_BYTES:
        raise _too_large(size)
    comma = b"" if state.endswith(b":{}}") else b","
    return state[:-2] + comma + json.dumps(step).encode() + b":" + output + b"}}"


def output_of(body: bytes, spec: StepSpec | None, *, is_handler: bool = False) -> bytes:
    """The output of a step as JSON: what its handler returned, or the text of a model's answer."""
    if is_handler or (spec is not None and spec.handler):
        return body
    found = jiter.from_json(body, cache_mode="none")
    blocks = found.get("content", []) if isinstance(found, dict) else []
    text = "".join(str(block.get("text", "")) for block in blocks if isinstance(block, dict))
    return json.dumps(text, ensure_ascii=False).encode(errors="replace")


def _together(sizes: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Divide numbers, each given with its bytes, so that if possible they have no more than `BYTES_AT_ONCE`."""
    some, sum_bytes = list[int](), 0
    for number, size in sizes:
        if some and (sum_bytes + size > BYTES_AT_ONCE or len(some) >= AT_ONCE):
            yield some
            some, sum_bytes = [], 0
        some.append(number)
        sum_bytes += size
    if some:
        yield some


def _is_left(end: Ending, flow: FlowHop) -> bool:
    """Whether an item of an earlier run of the pipeline was left because that run had ended, although this one has
    begun."""
    return end.code == "cancelled" and end.ended_ms >= flow.since_ms


def _too_large(size: int) -> RequestProblem:
    return RequestProblem(
        "too_large", f"the input and the outputs of the steps have {size} bytes, allowed are {UNPACKED_BYTES}"
    )


def _item_failed(k: int, end: Completion) -> RequestProblem:
    document = json.loads(end.body)
    detail = str(document.get("detail", "")).removesuffix(PROBLEMS[end.code].advice)
    status = document.get("status")
    return RequestProblem(
        end.code, f"item {k + 1}: {detail}", status=status if isinstance(status, int) else None, brief=f"item {k + 1}"
    )


def _side_of(tenant: str, lane: LaneSpec) -> int | None:
    """The side queue in which workers look for room for this tenant first; None if the lane has none."""
    numbers = range(lane.side_queues)
    return min(numbers, key=lambda number: blake2b(f"{number} {tenant}".encode(), digest_size=8).digest(), default=None)


def _keeper_ms(since_ms: int) -> int:
    """A power of two, so that the message passes one queue of the delay cascade."""
    delay_ms = KEEPER_MS
    while delay_ms < min(LONGEST_KEEPER_MS, since_ms // 4):
        delay_ms *= 2
    return delay_ms


def _pause_ms(since_ms: int, done: int, count: int) -> int:
    """A quarter of the time that the items still take at their pace, or of the time so far if none has ended."""
    left_ms = since_ms * (count - done) / done if done else since_ms
    return min(LONGEST_WAIT_MS, max(LEAST_WAIT_MS, round(left_ms / 4)))
