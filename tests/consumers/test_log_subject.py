"""Log lines get the fields of the request that they are about."""

import asyncio
import gc
import weakref
from collections.abc import Mapping
from typing import Any

from consumers.log_subject import about, fields_of_subject


class Subject:
    attempt = 1

    def log_fields(self) -> Mapping[str, Any]:
        return {"request": "m-1", "attempt": self.attempt}


async def test_a_task_that_outlives_its_block_keeps_the_fields_and_a_cancelled_timer_keeps_no_request() -> None:
    may_end = asyncio.Event()

    async def later() -> Mapping[str, Any]:
        await may_end.wait()
        return fields_of_subject()

    async def handled() -> tuple["asyncio.Task[Mapping[str, Any]]", "weakref.ref[Subject]"]:
        subject = Subject()
        with about(subject):
            async with asyncio.timeout(600):  # its timer is cancelled, and stays in the loop for ten minutes
                subject.attempt = 2
                assert fields_of_subject() == {"request": "m-1", "attempt": 2}
                await asyncio.sleep(0)
            return asyncio.create_task(later()), weakref.ref(subject)

    gc.disable()
    try:
        task, subject = await handled()
        assert subject() is None
    finally:
        gc.enable()
    assert fields_of_subject() == {}
    may_end.set()
    assert await task == {"request": "m-1", "attempt": 2}
