"""Checks that the workers accept the tenant that the gateway names in a request.

Workers accept `x-lane-tenant` only from users in LANEKEEPER_SPEAKERS, and ignore it otherwise. If they ignored it for
the gateway's user, all callers would share one tenant, and each could read the others' answers by their ids. So before
the gateway accepts the first HTTP call whose tenant is not the gateway's own AMQP user, it asks a worker a question
that workers answer only to users in LANEKEEPER_SPEAKERS.
"""

import uuid

from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.errors import ControlRefused, NotEnded
from service.gateway.problems import ApiError, refused


class SpeakerCheck:
    """Checks that the workers let the gateway send requests of other tenants than its own AMQP user (`user`). It asks a
    worker at each call until a worker has answered that this is allowed, and then never again."""

    def __init__(self, client: Client, *, user: str) -> None:
        self._client = client
        self._user = user
        self._is_accepted = False

    async def check(self, tenant: str | None) -> None:
        """Raise ApiError if the workers do not accept requests of this tenant from the gateway, or cannot be asked."""
        if self._is_accepted or tenant is None or tenant == self._user:
            return
        try:
            await self._client.result(uuid.uuid4().hex, tenant=tenant)
        except NotEnded:
            self._is_accepted = True
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
