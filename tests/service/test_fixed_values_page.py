"""docs/fixed-values.md has every number that the code defines in capitals, with its value."""

from tests.support.fixed_values_page import PAGE, page, rows


def test_docs_fixed_values_is_generated_from_the_code() -> None:
    told = "if the change is meant: .venv/bin/python -m tests.support.fixed_values_page"

    assert sorted(rows(page())) == sorted(rows(PAGE.read_text())), told
