"""The settings of handlers and pipelines."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from consumers.flows.handlers import HandlerSpec
from service.config.value_types import Disagreement, Section, wrong

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_RUN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
THE_MODEL = "messages"


def _run(value: str) -> str:
    if _RUN.fullmatch(value) is None:
        raise wrong("module:function, such as documents.parts:chunk")
    return value


class HandlerSettings(Section):
    """A Python function that answers requests whose property `type` is the handler's name."""

    run: Annotated[str, AfterValidator(_run)] | None = None
    """The function, as `module:function`. The module is also looked for in the folder in which the worker was started.
    Example: documents.parts:chunk"""
    kind: Literal["async", "cpu"] = "async"
    """`async`: an `async def`, which runs in the worker's event loop. `cpu`: a function that computes; it runs in one
    of as many processes as the machine has cores."""
    many: bool = False
    """Reserved: a handler that takes a list of requests at a time is not available in this version."""

    def disagreements(self) -> Iterator[Disagreement]:
        if self.run is None:
            yield Disagreement("is not set: the function, as module:function", at=(("run",),))
        if self.many:
            yield Disagreement(
                "a handler that takes many requests at a time is not available yet; remove it", (("many",),)
            )

    def spec(self, name: str) -> HandlerSpec:
        return HandlerSpec(name=name, run=self.run or "", kind=self.kind)


def wrong_names(kind: str, names: Iterable[str]) -> Iterator[Disagreement]:
    """Find names that no handler or pipeline may have. `kind`: the group of settings."""
    for name in names:
        if _NAME.fullmatch(name) is None or (kind == "handlers" and name == THE_MODEL):
            taken = " (messages is the model)" if name == THE_MODEL else ""
            text = f"{name[:80]!r} is no name: a to z, 0 to 9, _ and -, up to 40, a letter first{taken}"
            yield Disagreement(text, at=((kind, name),))
