"""Prints the answer to a request, or the error with which it ended."""

import json as json_text
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lanekeeper.replies import Final, Problem


def print_answer(answer: "Final", *, json: bool) -> None:
    """Print the text of a request's answer, or with `json` the whole Message of Anthropic's API."""
    print_text(answer.body.decode() if json else answer.text, end="\n")


def print_json(value: object) -> None:
    """Print a value as indented JSON, for the option `--json`."""
    print(json_text.dumps(value, indent=2, ensure_ascii=False))


def print_text(text: str, *, end: str) -> None:
    """Print text at once, without buffering. On a terminal, control characters are replaced by `�`; a pipe or a file
    gets the text unchanged."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def tell_problem(problem: "Problem") -> None:
    """Print a failed request's error in one line on standard error."""
    attempts = f"{problem.attempts} attempt{'' if problem.attempts == 1 else 's'}"
    print(
        f"lanekeeper: {problem.code} ({problem.status}): {printable(problem.detail)} "
        f"[request {printable(problem.request)}, {attempts}]",
        file=sys.stderr,
    )


def printable(text: str) -> str:
    """The text with `�` in place of control characters, so that a model's answer cannot control the terminal."""
    return "".join(character if character in "\n\t" or character.isprintable() else "�" for character in text)
