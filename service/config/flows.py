"""The settings of handlers and pipelines."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal, get_args

import jiter
from pydantic import AfterValidator, Field, PlainValidator

from consumers.flows.handlers import HandlerSpec
from consumers.flows.pipelines import INPUT, ITEM, NUMBER, OnFailure, PipelineSpec, StepSpec
from service.config.value_types import NAME, Disagreement, Section, UserNames, clash, mask, matching, wrong
from topology.lanes import LaneSpec

_RUN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
THE_MODEL = "messages"


_run = matching(_RUN, "module:function, such as documents.parts:chunk")


class HandlerSettings(Section):
    """A Python function that answers requests whose property `type` is the handler's name."""

    run: Annotated[str, AfterValidator(_run)] | None = None
    """The function, as `module:function`. The module is also looked for in the folder in which the worker was started.
    Example: documents.parts:chunk"""
    kind: Literal["async", "cpu"] = "async"
    """`async`: an `async def`, which runs in the worker's event loop. `cpu`: a function that computes; it runs in one
    of as many processes as the machine has cores, and one more for the most urgent lane."""
    many: bool = False
    """Whether the function takes a list, of what several requests ask at the same time, and returns a list of the same
    length: a result, or an exception, for each."""
    count: Annotated[int, Field(ge=2, le=1000)] = 20
    """With `many`: the most requests in one call. So many slots of the lane are needed as well."""
    window_ms: Annotated[int, Field(ge=1, le=10_000)] = 20
    """With `many`: for how long the first request waits for others."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.run is None:
            yield clash("is not set: the function, as module:function", "run")

    def spec(self, name: str) -> HandlerSpec:
        return HandlerSpec(
            name=name, run=self.run or "", kind=self.kind, many=self.many, count=self.count,
            window_s=self.window_ms / 1000,
        )  # fmt: skip


def _step(given: Any) -> StepSpec:
    """Raises TypeError or ValueError; its text, if it has one, says what is wrong."""
    if isinstance(given, StepSpec):
        given = asdict(given)
    if unknown := sorted(given.keys() - {field.name for field in fields(StepSpec)}):
        raise ValueError(f"there is no {mask(unknown[0])}")
    if wrong_texts := [name for name in _TEXTS if not isinstance(given.get(name, ""), str)]:
        raise ValueError(f"{wrong_texts[0]} is no text")
    tokens = given.get("max_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= 10**6):
        raise ValueError("max_tokens is no number from 1")
    if given.get("on_failure", "fail") not in get_args(OnFailure):
        raise ValueError("on_failure is none of these")
    return StepSpec(**given)


def _read_steps(value: Any) -> tuple[StepSpec, ...]:
    try:
        if isinstance(value, str):  # in the environment as JSON
            value = jiter.from_json(value.encode())
        return tuple(_step(given) for given in value)
    except (AttributeError, TypeError, ValueError) as error:
        why = f"; {error}" if isinstance(error, ValueError) else ""
        raise wrong(
            "one table for each step: name, prompt or handler, and perhaps lane, model, max_tokens, each, and "
            f"on_failure ({', '.join(get_args(OnFailure))}); in the environment as JSON{why}"
        ) from None


_TEXTS = ("name", "prompt", "handler", "lane", "model", "each", "on_failure")
_WORDS = frozenset({"and", "else", "false", "if", "in", "is", "loop", "none", "not", "or", "self", "true"})
_STEP = re.compile(r"[a-z][a-z0-9_]{0,31}")
Steps = Annotated[tuple[StepSpec, ...], PlainValidator(_read_steps)]


class PipelineSettings(Section):
    """Steps that are run one after the other for a request with the header `x-lane-pipeline` (docs/pipelines.md)."""

    steps: Steps = ()
    """The steps, in order: in TOML a `[[pipelines.NAME.steps]]` each. Example: [{"name": "summary", "prompt": "Sum up:
    {{ input.text }}"}]"""
    tenants: UserNames = ()
    """The tenants that may run it although it has steps in other lanes than that of their request, where requests need
    `user_id`; `*`: all. Example: crm"""

    def disagreements(self) -> Iterator[Disagreement]:
        if not self.steps:
            yield clash("has no steps", "steps")
        known = [INPUT]
        later = [step.name for step in self.steps]
        for step in self.steps:
            later = later[1:]
            for text in _wrong_in(step, known, later):
                yield clash(f"step {step.name[:40]!r}: {text}", "steps")
            known.append(step.name)

    def spec(self, name: str) -> PipelineSpec:
        return PipelineSpec(name, self.steps, self.tenants)


def _wrong_in(step: StepSpec, known: Sequence[str], later: Sequence[str]) -> Iterator[str]:
    """What is wrong with a step, whose templates may name `known`. `later`: the steps after it."""
    from consumers.flows.templates import Expression, Template, Unrendered

    if _STEP.fullmatch(step.name) is None or step.name in (INPUT, ITEM, NUMBER):
        yield f"is no name: a to z, 0 to 9 and _, up to 32, a letter first, not {INPUT}, {ITEM} or {NUMBER}"
    if step.name in _WORDS:
        yield "is a word of templates: choose another name"
    if step.name in known:
        yield "there are two steps of this name"
    if bool(step.prompt) == bool(step.handler):
        yield "give it a prompt or a handler"
    if step.on_failure != "fail" and not step.each:
        yield "on_failure is for the items of `each`"
    if step.handler and (step.model or step.max_tokens):
        yield "model and max_tokens are for a prompt"
    items = [ITEM, NUMBER] if step.each else []
    for source, kind, names in ((step.prompt, Template, [*known, *items]), (step.each, Expression, known)):
        try:
            used = kind(source).names if source else frozenset[str]()
        except Unrendered as error:
            yield f"its template cannot be read: {error}"
            continue
        for name in sorted(used - set(names)):
            if name == step.name or name in later:
                yield f"it uses {name!r}, which has not run then: steps run in order, and not in a cycle"
            else:
                yield f"it uses {name[:40]!r}, and there are only {', '.join(names)}"


def wrong_references(
    pipelines: Mapping[str, PipelineSettings], *, handlers: Collection[str], lanes: Mapping[str, LaneSpec]
) -> Iterator[Disagreement]:
    """Find handlers and lanes that steps name, and that are not declared, and models that their lane does not allow."""
    for name, pipeline in pipelines.items():
        for step in pipeline.steps:
            lane = lanes.get(step.lane)
            if lane is not None and lane.models is not None and step.model and step.model not in lane.models:
                text = f"step {step.name[:40]!r}: model {step.model[:80]!r} is not allowed in lane {lane.name}"
                yield Disagreement(text, at=(("pipelines", name, "steps"),))
            for kind, word, known in (("handler", step.handler, handlers), ("lane", step.lane, lanes)):
                if word and word not in known:
                    text = f"step {step.name[:40]!r}: {kind} {word[:40]!r} is not declared"
                    yield Disagreement(text, at=(("pipelines", name, "steps"),))


def wrong_names(kind: str, names: Iterable[str], *, taken: Mapping[str, str] | None = None) -> Iterator[Disagreement]:
    """Find names that nothing of the group `kind` may have. `taken`: names, and by what they are taken."""
    for name in names:
        if taken and name in taken:
            yield Disagreement(f"the name {name} is taken: by {taken[name]}; choose another", at=((kind, name),))
        elif NAME.fullmatch(name) is None:
            text = f"{name[:80]!r} is no name: a to z, 0 to 9, _ and -, up to 40, a letter first"
            yield Disagreement(text, at=((kind, name),))
