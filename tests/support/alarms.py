"""A memory alarm on a broker in a container: the broker stops reading from connections that publish."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

NORMAL = "0.6"
NOTHING = "0.00001"


@asynccontextmanager
async def memory_alarm(amqp_url: str) -> AsyncIterator[None]:
    """Raise a memory alarm for as long as the block lasts. It affects all publishers, so the broker should be the
    test's own."""
    container = await _container(amqp_url)
    await _set(container, NOTHING)
    try:
        yield
    finally:
        await _set(container, NORMAL)


async def _container(amqp_url: str) -> str:
    try:
        found = await _run("docker", "ps", f"--filter=publish={urlsplit(amqp_url).port}", "--format={{.ID}}")
    except FileNotFoundError:
        found = ""
    if not found:
        pytest.skip("the broker is not in a container, where its alarms could be set off")
    return found


async def _set(container: str, watermark: str) -> None:
    await _run("docker", "exec", container, "rabbitmqctl", "--quiet", "set_vm_memory_high_watermark", watermark)


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, command
    return said.decode().strip()
