"""A broker without a valid certificate gets neither the user name nor the password."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.problems import BrokerUnreachable
from service.config.settings import TlsSettings
from tests.support.certificates import certificate
from tests.support.fake_gateway import KEY, FakeGateway


@asynccontextmanager
async def listening(
    cert: Path, key: Path, *, newest: ssl.TLSVersion | None = None
) -> AsyncIterator[tuple[int, bytearray]]:
    """A TLS server in place of a broker: its port, and the decrypted bytes that it received."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if newest is not None:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = newest, newest
    told = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.extend(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], told


async def said(port: int, ca: Path | None) -> str:
    context = TlsSettings(ca_file=ca).context()
    with pytest.raises(BrokerUnreachable) as refused:
        async with Connection(f"amqps://user:s3cret@localhost:{port}/", name="test", ssl_context=context):
            pass
    return str(refused.value)


async def test_a_certificate_of_an_unknown_authority_is_refused(tmp_path: Path) -> None:
    async with listening(*certificate(tmp_path, "localhost")) as (port, told):
        assert "self-signed certificate" in await said(port, None)
    assert told == b""


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "elsewhere")
    async with listening(cert, key) as (port, told):
        assert "'localhost'" in await said(port, cert)
    assert told == b""


async def test_a_broker_that_supports_only_tls_1_0_is_refused(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "localhost")
    with pytest.warns(DeprecationWarning, match="TLS"):
        async with listening(cert, key, newest=ssl.TLSVersion.TLSv1) as (port, told):
            await said(port, cert)
    assert told == b""


async def test_a_broker_with_a_trusted_certificate_is_connected_to(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "localhost")
    async with listening(cert, key) as (port, told):
        await said(port, cert)  # it does not speak AMQP
    assert told.startswith(b"AMQP")


async def test_a_gateway_without_a_valid_certificate_never_gets_the_key(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "localhost")
    async with listening(cert, key) as (port, told):
        with pytest.raises(BrokerUnreachable, match="certificate"):
            async with Client(f"https://localhost:{port}", api_key=KEY):
                pass
        assert not told

    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    async with (
        FakeGateway(ssl_context=serving) as gateway,
        Client(gateway.url, api_key=KEY, ssl_context=TlsSettings(ca_file=cert).context()) as client,
    ):
        assert (await client.request({"prompt": "hello"}, key="normal.tests.tls")).text == "Pô"
