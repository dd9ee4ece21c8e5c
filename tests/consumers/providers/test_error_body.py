"""Of a compressed error answer, no more is decompressed than is read."""

import gzip
import zlib
from collections.abc import AsyncIterator, Callable

import httpx2
import pytest

from consumers.providers.client_options import bound_error_body

KIB = 1024
PACKING: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}


class Pieces(httpx2.AsyncByteStream):
    """A body in the pieces in which it arrives from the network."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 16 * KIB):
            yield self._body[at : at + 16 * KIB]


@pytest.mark.parametrize("encoding", PACKING)
async def test_a_decompression_bomb_is_read_up_to_64_kib(encoding: str) -> None:
    packed = PACKING[encoding](bytes(4096 * KIB))
    response = httpx2.Response(400, headers={"content-encoding": encoding}, stream=Pieces(packed))
    await bound_error_body(response)
    assert len(await response.aread()) == 64 * KIB


@pytest.mark.parametrize("encoding", PACKING)
async def test_a_short_error_body_is_read_completely(encoding: str) -> None:
    packed = PACKING[encoding](b'{"type":"error"}')
    response = httpx2.Response(529, headers={"content-encoding": encoding}, stream=Pieces(packed))
    await bound_error_body(response)
    assert await response.aread() == b'{"type":"error"}'
