"""Whether the workers believe the gateway whose a request is.

They believe `x-lane-tenant` of users in LANEKEEPER_SPEAKERS alone, and ignore it otherwise: then all tenants would be
one, and each could read the others' answers by their ids. So no call with a key goes out before a worker has answered
a question that it answers to speakers only.
"""

import uuid

from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.errors import ControlRefused, NotEnded
from service.gateway.problems import ApiError, refused


class Speaking:
    """Asks once, and again until a worker has said yes. `user`: the broker's user that the gateway is."""

    def __init__(self, client: Client, *, user: str) -> None:
        self._client = client
        self._user = user
        self._is_believed = False

    async def see_that_it_may(self, tenant: str | None) -> None:
        """Raises ApiError if requests would not count as this tenant's."""
        if self._is_believed or tenant is None or tenant == self._user:
            return
        try:
            await self._client.result(uuid.uuid4().hex, tenant=tenant)
        except NotEnded:
            self._is_believed = True
        except ControlRefused as error:
            if error.is_passing:
                raise refused(str(error)) from error
            raise ApiError(
                500,
                f"the workers do not believe the broker's user {self._user!r} whose requests these are: "
                "its name has to be in their LANEKEEPER_SPEAKERS",
                headers={"x-should-retry": "false"},
            ) from error
        except LanekeeperError as error:
            raise refused(f"whose request this is has to be told to a worker first: {error}") from error
