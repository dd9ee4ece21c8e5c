"""Records what applications sent and received, which calls the provider got and which faults were active; checks such a
history for broken promises, and measures how well the service worked.

A history is append-only; in a file, a line of JSON an event. Times are `time.monotonic()`, which all processes of a
machine share. `check` is a pure function. The promise (docs/contract.md): what was confirmed ends in exactly one final
outcome. A reply may come twice, the same; a provider may be called again, but not once an answer is out."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Literal

Told = Literal["confirmed", "refused", "returned", "unknown"]
"""The result of one publish: `refused` by a nack, `returned` as unroutable, `unknown` without a confirm."""
OK = "ok"
"""The code of an outcome that is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An application expects an answer, identified by its correlation id."""

    at_s: float
    question: str
    """The correlation id."""
    identity: str
    """The message id: several questions may share it."""
    lane: str
    words: str
    """Words that an `ok` answer must contain."""
    expects: tuple[str, ...] = (OK,)
    """Codes of the correct outcomes."""
    heard: bool = True
    """False if no reply is possible: its outcome is fetched at the end."""
    due_s: float = 0.0
    """If delayed: not to be answered before this time."""
    posted: bool = False
    """Whether its outcome is posted to a webhook."""
    piped: bool = False
    """Whether it is a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    at_s: float
    question: str
    sent_s: float
    told: Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    at_s: float
    question: str
    identity: str
    """The header `x-lane-request-id`."""
    code: str
    """`ok`, or the problem's."""
    digest: str
    """Digest of the body: equal answers have equal bytes."""
    text: str
    """The beginning of an `ok` answer's text."""
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """An outcome was posted to a webhook, which accepted it; its signature was right."""

    at_s: float
    identity: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A dead letter was seen."""

    at_s: float
    identity: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The provider was called. `outcome`: `ok`, `client_gone`, `running`, or the fault."""

    at_s: float
    ended_s: float | None
    identity: str
    outcome: str
    step: str = ""
    """In a pipeline, the numbers of the step and of the item: `2.1`."""
    batch: str = ""
    """The id of the provider's batch in which it was; empty: it was live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    at_s: float
    healed_s: float
    code: str
    """In the catalogue: `A1`."""
    title: str
    against: str
    in_flight: int
    """Requests that were confirmed and not answered when it began."""


Event = Asked | Published | Replied | Posted | Parked | Called | Disturbed


class History:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        self.events.append(event)


def as_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)})


@dataclass(frozen=True, slots=True)
class Stall:
    lane: str
    began_s: float
    ended_s: float

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s

    def within(self, from_s: float, until_s: float) -> "Stall | None":
        began_s, ended_s = max(self.began_s, from_s), min(self.ended_s, until_s)
        return Stall(self.lane, began_s, ended_s) if began_s < ended_s else None


def stalls_of(owed: Iterable[tuple[str, float, float | None]]) -> dict[str, list[Stall]]:
    """The stalls of each lane. `owed`: lane, waiting since, answered at (None: never)."""
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for lane, since_s, answered_s in owed:
        if answered_s is None:
            changes[lane].append((since_s, +1))
        elif answered_s > since_s:
            changes[lane] += [(since_s, +1), (answered_s, -1)]
    return {lane: _pauses(lane, sorted(found)) for lane, found in changes.items()}


def _pauses(lane: str, changes: Sequence[tuple[float, int]]) -> list[Stall]:
    found, owing, since_s = [], 0, 0.0
    for at_s, change in changes:
        if change < 0:
            found.append(Stall(lane, since_s, at_s))
        if change < 0 or not owing:
            since_s = at_s
        owing += change
    return found


def longest(stalls: Sequence[Stall]) -> Stall | None:
    return max(stalls, key=lambda each: each.lasted_s, default=None)


CANCELLED = "cancelled"
STOPPED_WITHIN_S = 2.0
LOST = "lost"
TWO_OUTCOMES = "two outcomes"
TWO_BODIES = "two bodies"
NEVER_ASKED = "never asked"
OF_ANOTHER = "answer to another question"
UNEXPECTED = "unexpected outcome"
CALLED_AFTER_END = "called after it had ended"
IN_TWO_BATCHES = "in two batches"
CALLED_AFTER_STEP = "called after its step had ended"
NOT_PARKED = "not parked"
SLOTS_LOST = "slots lost"
NOT_POSTED = "not posted"
POSTED_AGAIN = "posted again"
PAID_AGAIN = "paid again"
CUT_OFF = ("A", "B", "C4", "C5", "D5")
"""Faults that end or interrupt calls: of a worker, of its connection to the broker, which ends the work on what came
over it, and of the line to the provider. The provider may have answered just then."""
TIMES_OUT_S = 3.0
"""A worker gives up a call after four seconds (`ground.PATIENT`), some of which pass before the provider's begin."""
AROUND_S = 2.0
"""How long before such a fault an answer may have been given that it cut off, and after it."""
CLOSING_S = 30.0
"""Garbled bytes make RabbitMQ close the connection. It waits so long for the answer (`CLOSING_TIMEOUT` in
rabbit_reader.erl) before it delivers again what the connection had; what it delivers over others that end just then is
delivered to two workers within milliseconds."""
KEPT_IN_LANE_DEAD = frozenset({"invalid_request", "provider_rejected", "attempts_exhausted", "poison", "internal"})
"""Errors whose requests are also in `lane.dead`."""


@dataclass(frozen=True, slots=True)
class Violation:
    kind: str
    identity: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.identity}: {self.text}"


@dataclass(frozen=True, slots=True)
class Recovery:
    """How the service recovered from one fault."""

    fault: Disturbed
    stall: Stall | None
    """The longest stall of any lane between the beginning of this fault and that of the next."""
    recovered_s: float
    """From the fault's end until everything that was confirmed before is answered; includes the requests' own time."""
    confirmed: int
    lost: int
    answered_twice: int
    repeated_calls: int

    @property
    def stall_s(self) -> float:
        return 0.0 if self.stall is None else self.stall.lasted_s


@dataclass(frozen=True, slots=True)
class Verdict:
    violations: tuple[Violation, ...]
    asked: int
    confirmed: int
    """Distinct requests: one that was published again on purpose counts once."""
    pipelines: int
    """Of those that are confirmed."""
    answered_twice: int
    """Replies beyond one for each publish. They are allowed: at-least-once."""
    posted_again: int
    """Posts that were accepted beyond one for each publish. They are allowed after a fault: at-least-once."""
    repeats: tuple[Called, ...]
    """Calls beyond the first, except after one that the provider refused or interrupted itself."""
    stalls: Mapping[str, Stall]
    """The longest stall of each lane."""
    recoveries: tuple[Recovery, ...]

    def of(self, kind: str) -> tuple[Violation, ...]:
        return tuple(each for each in self.violations if each.kind == kind)

    @property
    def repeated_calls(self) -> int:
        return len(self.repeats)

    @property
    def lost(self) -> int:
        return len(self.of(LOST))


@dataclass(slots=True)
class _Question:
    asked: Asked
    published: list[Published] = field(default_factory=list)
    replies: list[Replied] = field(default_factory=list)

    @property
    def confirmed_s(self) -> float | None:
        return min((each.at_s for each in self.published if each.told == "confirmed"), default=None)

    @property
    def is_lost(self) -> bool:
        return self.confirmed_s is not None and not self.replies

    @property
    def doubled(self) -> tuple[Replied, ...]:
        """Replies beyond the number of publishes that may have arrived."""
        arrived = sum(each.told in ("confirmed", "unknown") for each in self.published)
        return tuple(self.replies[max(1, arrived) :])


def check(events: Iterable[Event], *, store_was_lost: bool = False) -> Verdict:
    """Judge a run that is over.

    `store_was_lost`: what had ended may run once more, and differently.
    """
    questions: dict[str, _Question] = {}
    strangers: list[Replied] = []
    calls: dict[str, list[Called]] = defaultdict(list)
    parked: dict[str, list[Parked]] = defaultdict(list)
    posted: dict[str, list[Posted]] = defaultdict(list)
    faults: list[Disturbed] = []
    for event in sorted(events, key=lambda each: each.at_s):
        match event:
            case Asked():
                questions[event.question] = _Question(event)
            case Published():
                questions[event.question].published.append(event)
            case Replied():
                if (found := questions.get(event.question)) is None:
                    strangers.append(event)
                else:
                    found.replies.append(event)
            case Called():
                calls[event.identity].append(event)
            case Posted():
                posted[event.identity].append(event)
            case Parked():
                parked[event.identity].append(event)
            case Disturbed():
                faults.append(event)
    violations = [Violation(NEVER_ASKED, each.identity, f"a reply to {each.question!r}") for each in strangers]
    by_identity: dict[str, list[_Question]] = defaultdict(list)
    for each in questions.values():
        by_identity[each.asked.identity].append(each)
        violations += _of_question(each)
    for identity, theirs in by_identity.items():
        violations += _of_identity(identity, theirs, calls[identity], store_was_lost=store_was_lost)
        if not store_was_lost:
            violations += _of_payments(identity, calls[identity], faults)
        violations += _of_dead_letters(identity, theirs, parked[identity])
        first_s = min((fault.at_s for fault in faults), default=inf)
        violations += _of_webhook(identity, theirs, posted[identity], first_s=first_s, store_was_lost=store_was_lost)
    for identity in calls.keys() - by_identity.keys():
        violations.append(Violation(NEVER_ASKED, identity, "the provider was called"))
    every = list(questions.values())
    repeats = [call for theirs in calls.values() for call in _repeats(theirs)]
    stalls = stalls_of(
        (each.asked.lane, max(each.confirmed_s, each.asked.due_s), each.replies[0].at_s if each.replies else None)
        for each in every
        if each.confirmed_s is not None and each.asked.heard
    )
    return Verdict(
        violations=tuple(violations),
        asked=len(every),
        confirmed=sum(each.confirmed_s is not None for each in every),
        pipelines=sum(each.confirmed_s is not None and each.asked.piped for each in every),
        answered_twice=sum(len(each.doubled) for each in every),
        posted_again=sum(len(_beyond(theirs, posted[identity])) for identity, theirs in by_identity.items()),
        repeats=tuple(repeats),
        stalls={lane: worst for lane, pauses in stalls.items() if (worst := longest(pauses)) is not None},
        recoveries=_recoveries(faults, every, repeats, [each for pauses in stalls.values() for each in pauses]),
    )


def _of_question(each: _Question) -> list[Violation]:
    asked, found = each.asked, []
    if each.is_lost:
        found.append(Violation(LOST, asked.identity, f"{asked.lane}: confirmed, and no outcome came"))
    for reply in each.replies:
        if reply.identity != asked.identity or (reply.code == OK and asked.words not in reply.text):
            found.append(Violation(OF_ANOTHER, asked.identity, f"{reply.identity}: {reply.text[:80]!r}"))
        if reply.code not in asked.expects:
            found.append(Violation(UNEXPECTED, asked.identity, f"{reply.code}; right is {', '.join(asked.expects)}"))
    return found


def _of_identity(
    identity: str, questions: Sequence[_Question], calls: Sequence[Called], *, store_was_lost: bool
) -> list[Violation]:
    # A request that need not get the stored outcome (another body under its id) is checked separately.
    bound = [each for each in questions if each.asked.expects != ("idempotency_conflict",)]
    replies = [reply for each in bound for reply in each.replies]
    found = []
    if len(codes := {each.code for each in replies}) > 1:
        found.append(Violation(TWO_OUTCOMES, identity, ", ".join(sorted(codes))))
    if store_was_lost:
        return found
    if len({each.digest for each in replies}) > 1:
        found.append(Violation(TWO_BODIES, identity, f"{len(replies)} replies"))
    ended_s = min((each.at_s for each in replies), default=None)
    after = calls
    if codes == {CANCELLED}:  # of a pipeline, items that had just begun are stopped; a batch that was created is paid
        after = [call for call in calls if not call.batch and call.at_s > (ended_s or 0) + STOPPED_WITHIN_S]
    if ended_s is not None and any(call.at_s > ended_s for call in after):
        late_s = max(call.at_s for call in after) - ended_s
        found.append(Violation(CALLED_AFTER_END, identity, f"{late_s:.3f} s after its reply had come"))
    answered: dict[str, str] = {}
    for call in calls:
        if call.batch and answered.setdefault(call.step, call.batch) != call.batch:
            found.append(Violation(IN_TWO_BATCHES, identity, f"{call.batch}, after {answered[call.step]}"))
        if call.batch and call.outcome != OK:
            del answered[call.step]
    begun = ""  # a step begins once the outcomes of all before it are stored
    for call in calls:
        if (number := call.step.partition(".")[0]) < begun:
            found.append(Violation(CALLED_AFTER_STEP, identity, f"step {call.step}, after step {begun} had begun"))
        begun = max(begun, number)
    return found


def _of_payments(identity: str, calls: Sequence[Called], faults: Sequence[Disturbed]) -> list[Violation]:
    """A step that the provider has answered is not asked of it again, unless a fault may have cut the answer off, or it
    took too long."""
    cuts = [
        (each.at_s - AROUND_S, each.healed_s + AROUND_S + (CLOSING_S if each.code == "B10" else 0))
        for each in faults
        if each.code.startswith(CUT_OFF)
    ]
    paid: dict[str, Called] = {}
    found = []
    for call in calls:
        if (first := paid.get(call.step)) is not None and not (first.batch and not call.batch):
            took = "" if first.ended_s is None else f", answered {call.at_s - first.ended_s:.3f} s before"
            where = f"step {call.step or 'alone'}: {first.batch or 'live'}{took}, then {call.batch or 'live'}"
            found.append(Violation(PAID_AGAIN, identity, where))
        ended_s = call.at_s if call.ended_s is None else call.ended_s
        is_cut = ended_s - call.at_s > TIMES_OUT_S or any(from_s <= ended_s <= until_s for from_s, until_s in cuts)
        if call.outcome == OK and not is_cut:
            paid[call.step] = call
    return found


def _of_dead_letters(identity: str, questions: Sequence[_Question], parked: Sequence[Parked]) -> list[Violation]:
    kept = {each.code for each in parked}
    told = {reply.code for each in questions for reply in each.replies} & KEPT_IN_LANE_DEAD
    return [Violation(NOT_PARKED, identity, code) for code in sorted(told - kept)]


def _of_webhook(
    identity: str, questions: Sequence[_Question], posted: Sequence[Posted], *, first_s: float, store_was_lost: bool
) -> list[Violation]:
    if not any(each.asked.posted and each.confirmed_s is not None and not each.is_lost for each in questions):
        return []
    if not posted:
        return [Violation(NOT_POSTED, identity, "its webhook got nothing")]
    if any(again.at_s < first_s for again in _beyond(questions, posted)):
        return [Violation(POSTED_AGAIN, identity, f"{len(posted)} times, before the first fault")]
    if not store_was_lost and not {each.digest for each in posted} <= {
        reply.digest for each in questions for reply in each.replies
    }:
        return [Violation(TWO_BODIES, identity, "its webhook got something else than its requester")]
    return []


def _beyond(questions: Sequence[_Question], posted: Sequence[Posted]) -> Sequence[Posted]:
    """Posts that were accepted beyond one for each publish that may have arrived."""
    arrived = sum(each.told in ("confirmed", "unknown") for question in questions for each in question.published)
    return posted[max(1, arrived) :]


def _repeats(calls: Sequence[Called]) -> list[Called]:
    """Calls after one that the provider answered, or could not answer because the worker had gone."""
    paid = (OK, "client_gone", "running")
    return [
        call
        for n, call in enumerate(calls)
        if any(each.step == call.step and each.outcome in paid for each in calls[:n])
    ]


def _recoveries(
    faults: Sequence[Disturbed], questions: Sequence[_Question], repeats: Sequence[Called], stalls: Sequence[Stall]
) -> tuple[Recovery, ...]:
    found = []
    for n, fault in enumerate(faults):
        until_s = faults[n + 1].at_s if n + 1 < len(faults) else float("inf")
        answers = [
            (each.replies[0].at_s, max(fault.healed_s, each.asked.due_s))
            for each in questions
            if (confirmed_s := each.confirmed_s) is not None
            and confirmed_s <= fault.healed_s
            and each.replies
            and each.asked.heard
        ]
        inside = [
            each for each in questions if each.confirmed_s is not None and fault.at_s <= each.confirmed_s < until_s
        ]
        found.append(
            Recovery(
                fault,
                stall=longest([part for each in stalls if (part := each.within(fault.at_s, until_s)) is not None]),
                recovered_s=max((at_s - from_s for at_s, from_s in answers if at_s > from_s), default=0.0),
                confirmed=len(inside),
                lost=sum(each.is_lost for each in inside),
                answered_twice=sum(fault.at_s <= reply.at_s < until_s for each in questions for reply in each.doubled),
                repeated_calls=sum(fault.at_s <= call.at_s < until_s for call in repeats),
            )
        )
    return tuple(found)
