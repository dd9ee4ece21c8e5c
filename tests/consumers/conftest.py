import pytest


@pytest.fixture
def returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that cannot be settled is returned without a pause before."""
    monkeypatch.setattr("consumers.settle.RETURN_AFTER_S", 0)
