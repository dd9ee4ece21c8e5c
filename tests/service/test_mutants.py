"""`./dev mutants` makes changes that can be seen, and none where nothing can."""

import ast

import pytest

from tests.mutants.changes import changes
from tests.mutants.run import mutants


def changed(source: str) -> list[str]:
    """The source after each change."""
    found = []
    for at in range(len(changes(ast.parse(source)))):
        tree = ast.parse(source)
        changes(tree)[at].apply()
        compile(tree, "<source>", "exec")
        found.append(ast.unparse(tree))
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b"]),
        ("a == b != c", ["a != b != c", "a == b == c"]),
        ("now_s >= until", ["now_s < until"]),
        ("a + b", ["a - b"]),
        ("a + 'b'", []),
        ("a += b", ["a -= b"]),
        ("x = 1", ["x = 2"]),
        ("x = 60", ["x = 120"]),
        ("x = 0.5", ["x = 1.0"]),
        ("x = True", ["x = False"]),
        ("x = not a", ["x = a"]),
        ("x = a and b", ["x = a or b"]),
        ("x = max(a, b)", ["x = min(a, b)"]),
        ("while ready:\n    more()", ["while not ready:\n    more()", "while ready:\n    pass"]),
    ],
)
def test_each_place_gets_one_change(source: str, expected: list[str]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "x: Literal[3]",
        "def f(a: Final[1]) -> Some[2]:\n    '''Has 3.'''",
        "log.info('said', times=1)",
        "assert a < b",
        "f'{a + 1}'",
        "@cached(5)\ndef f(): ...",
        "def __repr__(self):\n    return a + b",
    ],
)
def test_code_that_no_test_can_see_is_not_changed(source: str) -> None:
    assert changed(source) == []


@pytest.mark.slow
def test_mutants_are_chosen_only_in_code_that_needs_no_broker() -> None:
    paths = {each.path for each in mutants([])}

    assert {"consumers/limits/lines.py", "topology/plan.py", "service/config/settings.py"} <= paths
    assert not [each for each in paths if each.startswith(("topology/broker", "consumers/state/redis", "service/demo"))]
