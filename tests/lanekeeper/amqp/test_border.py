"""aiormq's errors become our errors, and other errors pass unchanged."""

import pytest

from lanekeeper.amqp.driver.border import border
from lanekeeper.contract.problems import BrokerUnreachable


@pytest.mark.parametrize("raised", [OSError("gone"), TimeoutError(), RuntimeError("closed"), Exception()])
async def test_a_lost_connection_becomes_our_typed_error(raised: Exception) -> None:
    with pytest.raises(BrokerUnreachable, match="no channel"), border("no channel"):
        raise raised


async def test_a_programming_error_is_not_translated() -> None:
    with pytest.raises(ValueError, match="ours"), border("no channel"):
        raise ValueError("ours")
