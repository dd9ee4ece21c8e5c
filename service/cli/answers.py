"""Prints an answer, or the problem with which a request ended."""

import json as json_text
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lanekeeper.replies import Final, Problem


def print_answer(answer: "Final", *, json: bool) -> None:
    """Print the answer's text, or the whole Message as JSON."""
    print_text(answer.body.decode() if json else answer.text, end="\n")


def print_json(value: object) -> None:
    """What `--json` of a command that lists things prints."""
    print(json_text.dumps(value, indent=2, ensure_ascii=False))


def print_text(text: str, *, end: str) -> None:
    """Print text without delay. Into a pipe or a file it goes unchanged."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def tell_problem(problem: "Problem") -> None:
    """Print the problem in one line on standard error."""
    attempts = f"{problem.attempts} attempt{'' if problem.attempts == 1 else 's'}"
    print(
        f"lanekeeper: {problem.code} ({problem.status}): {printable(problem.detail)} "
        f"[request {printable(problem.request)}, {attempts}]",
        file=sys.stderr,
    )


def printable(text: str) -> str:
    """The text without control characters, so that a model's answer cannot control the terminal."""
    return "".join(each if each in "\n\t" or each.isprintable() else "�" for each in text)
