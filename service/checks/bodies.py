"""Checks, for `lanekeeper check`, whether the store of large bodies can be used: it writes, reads and removes a small
body."""

import asyncio
from typing import Final

from lanekeeper.bodies import BodiesUnavailable, BodyError
from service.checks.providers import Finding
from service.config.settings import Settings

WITHIN_S: Final = 15.0
"""How many seconds `lanekeeper check` waits for the store of bodies."""
CONTENT: Final = b"lanekeeper check"
SETTING: Final = "LANEKEEPER_BODIES__URL"


async def bodies(settings: Settings) -> Finding:
    """Check that a body can be written to the store for large bodies, read and removed. A missing folder is created, as
    a worker would do."""
    store = settings.body_store()
    if store is None:
        return Finding("bodies", None, f"there is no store for large bodies and answers ({SETTING}): they are refused")
    doing = "written"
    try:
        async with asyncio.timeout(WITHIN_S):
            kept = await store.keep([CONTENT])
            doing = "read"
            await store.fetch(kept)
            doing = "removed"
            await store.drop(kept)
    except TimeoutError:
        cause = f"no answer within {WITHIN_S:g} s"
    except BodyError as error:
        cause = str(error)
    except BodiesUnavailable as error:
        cause = error.cause
    else:
        return Finding("bodies", True, f"{store.url} can be written, read and cleared")
    finally:
        store.close()
    mend = f"see that it is there, and that this process may write, read and remove files in it ({SETTING})"
    return Finding("bodies", False, f"{store.url}: a body cannot be {doing}: {cause}; {mend}")
