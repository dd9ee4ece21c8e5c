"""docs/fixed-values.md has every number that the code defines in capitals, with its value."""

from tests.support.fixed_values_page import PAGE, page, rows


def test_every_value_of_the_code_is_on_the_page() -> None:
    told = "if the change is meant: .venv/bin/python -m tests.support.fixed_values_page"

    assert set(rows(page())) - set(rows(PAGE.read_text())) == set(), told
