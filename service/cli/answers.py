"""How an answer is printed, and the problem that a request ended in."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lanekeeper.replies import Final, Problem


def print_answer(answer: "Final", *, json: bool) -> None:
    """The text, or the whole Message as JSON."""
    print_text(answer.body.decode() if json else answer.text, end="\n")


def print_text(text: str, *, end: str) -> None:
    """At once; as it is where it goes into a pipe or a file."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def tell_problem(problem: "Problem") -> None:
    """One line on standard error."""
    attempts = f"{problem.attempts} attempt{'' if problem.attempts == 1 else 's'}"
    print(
        f"lanekeeper: {problem.code} ({problem.status}): {printable(problem.detail)} "
        f"[request {printable(problem.request)}, {attempts}]",
        file=sys.stderr,
    )


def printable(text: str) -> str:
    """Without control characters: what a model writes must not steer the terminal."""
    return "".join(each if each in "\n\t" or each.isprintable() else "�" for each in text)
