"""A Redis that is gone, empty, full, a replica, loading, or no Redis: the error says so, and the store recovers by
itself."""

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from consumers.state.base import Ended, Granted, Held, Running, StoreSpec, StoreUnavailable
from consumers.state.redis.store import RedisStore
from service.config.settings import TlsSettings
from tests.consumers.state.conftest import is_well_again, trouble_with
from tests.support.certificates import certificate
from tests.support.completions import ME, answered, fingerprint
from tests.support.memory_store import current
from tests.support.private_broker import LOOPBACK, free_ports
from tests.support.redis import RedisServer, redis_server, sentinel_server
from tests.support.waiting import until

PASSWORD = "s3cret"


def a_store(url: str) -> RedisStore:
    return RedisStore(url, namespace="lane")


@asynccontextmanager
async def told(server: RedisServer, *words: str, back: tuple[str, ...]) -> AsyncIterator[None]:
    async with Redis.from_url(server.url) as admin:
        await admin.execute_command(*words)  # type: ignore[no-untyped-call]
        yield
        await admin.execute_command(*back)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def listening(answer: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """A server that is not Redis; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while asked := await reader.read(65_536):
            writer.write(answer(asked))
        writer.close()

    async with await asyncio.start_server(serve, LOOPBACK, 0) as server:
        yield f"redis://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/0"


async def test_a_redis_that_was_gone_and_comes_back_empty_is_used_again(own_redis: RedisServer) -> None:
    async with a_store(own_redis.url) as store:
        found = await store.claim(ME, fingerprint())
        assert isinstance(found, Granted)
        own_redis.kill()
        trouble = await trouble_with(store)
        assert f"Redis at redis://127.0.0.1:{own_redis.port} cannot be reached: see that it runs" in trouble

        own_redis.start()
        assert await store.renew([Held(ME, found.token)]) == {}, "nobody has fenced it off"
        assert await store.complete(ME, fingerprint(), answered(), token=found.token) == answered()
        assert store.trouble is None


async def test_scripts_that_redis_has_forgotten_are_loaded_again(own_redis: RedisServer) -> None:
    async with a_store(own_redis.url) as store:
        await store.claim(ME, fingerprint())
        async with told(own_redis, "SCRIPT", "FLUSH", back=("PING",)):
            assert isinstance(await store.claim(ME, fingerprint()), Running)


async def test_a_redis_with_full_memory_raises_store_unavailable(own_redis: RedisServer) -> None:
    async with a_store(own_redis.url) as store:
        token = await store.claim(ME, fingerprint())
        assert isinstance(token, Granted)
        async with told(own_redis, "CONFIG", "SET", "maxmemory", "1", back=("CONFIG", "SET", "maxmemory", "0")):
            with pytest.raises(StoreUnavailable, match="refuses writes, its memory is full: raise maxmemory"):
                await store.complete(ME, fingerprint(), answered(), token=token.token)
            with pytest.raises(StoreUnavailable, match="memory is full"):
                await store.probe()
        assert isinstance(await store.claim(ME, fingerprint()), Running), "nothing of what was refused is there"
        assert await store.complete(ME, fingerprint(), answered(), token=token.token) == answered()


async def test_a_redis_that_lacks_its_required_replicas_raises_store_unavailable(own_redis: RedisServer) -> None:
    name = "min-replicas-to-write"
    async with a_store(own_redis.url) as store:
        async with told(own_redis, "CONFIG", "SET", name, "1", back=("CONFIG", "SET", name, "0")):
            assert "refuses writes: see its disk, its replicas and its log" in await trouble_with(store)
        assert isinstance(await is_well_again(store), Granted)


async def test_a_redis_replica_raises_store_unavailable(own_redis: RedisServer) -> None:
    async with a_store(own_redis.url) as store:
        async with told(own_redis, "REPLICAOF", LOOPBACK, "1", back=("REPLICAOF", "NO", "ONE")):
            assert "is a replica that may not be written: give the primary's address" in await trouble_with(store)
        assert isinstance(await is_well_again(store), Granted)


@asynccontextmanager
async def forwarding(port: Callable[[], int], tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A port whose new connections lead to the port that `port` names then, like a Service or a virtual address."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(65_536):
                writer.write(part)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(LOOPBACK, port())
        with suppress(asyncio.CancelledError):  # the test has ended
            await asyncio.gather(copy(reader, behind_writer), copy(behind_reader, writer))

    async with await asyncio.start_server(serve, LOOPBACK, 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


async def test_a_primary_that_was_demoted_is_left_for_the_one_to_which_its_address_leads(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with redis_server(tmp_path / "first") as first, redis_server(tmp_path / "second") as second:
        now = first
        async with forwarding(lambda: now.port) as port, a_store(f"redis://{LOOPBACK}:{port}/0") as store:
            assert store.trouble is None
            now = second
            async with Redis.from_url(first.url) as admin:  # its connections stay open
                await admin.execute_command("REPLICAOF", LOOPBACK, str(second.port))  # type: ignore[no-untyped-call]
            assert "replica that may not be written" in await trouble_with(store)
            assert isinstance(await is_well_again(store), Granted)


@pytest.mark.slow
async def test_a_store_that_sentinels_name_goes_on_with_the_replica_after_a_primary_was_killed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "sentinel")]
    for folder in folders:
        folder.mkdir()
    secured = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
    with (
        redis_server(folders[0], *secured) as first,
        redis_server(folders[1], *secured, "--replicaof", f"{LOOPBACK} {first.port}") as second,
        sentinel_server(folders[2], "main", first, password=PASSWORD) as sentinel,
    ):
        (nobody,) = free_ports(1)
        url = f"redis+sentinel://:{PASSWORD}@{LOOPBACK}:{nobody},{LOOPBACK}:{sentinel.port}/main/1"
        async with a_store(url) as store, Redis.from_url(f"redis://:{PASSWORD}@{LOOPBACK}:{second.port}/1") as replica:
            assert isinstance(await store.claim(ME, fingerprint()), Granted)
            await until(lambda: _knows_its_replica(sentinel.url))
            await until(lambda: replica.dbsize())
            loop = asyncio.get_running_loop()
            killed_s = loop.time()
            first.kill()
            assert PASSWORD not in await trouble_with(store)
            granted = await is_well_again(store)
            assert isinstance(granted, Granted)
            assert loop.time() - killed_s < 10
            first.start()  # it becomes a replica
            ended = await store.complete(ME, fingerprint(redelivered=True), answered(), token=granted.token)
            assert ended == answered()

            unknown = RedisStore(url.replace("/main/", "/other/"), namespace="lane")
            assert "has no primary that a Sentinel knows" in await trouble_with(unknown)
            await unknown.__aexit__()


async def _knows_its_replica(sentinel: str) -> bool:
    async with Redis.from_url(sentinel) as asked:
        return bool(await asked.sentinel_slaves("main"))


@pytest.mark.slow
async def test_the_authority_of_the_settings_signs_for_redis_too(tmp_path: Path, own_redis: RedisServer) -> None:
    cert, key = certificate(tmp_path, "localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    async with forwarding(lambda: own_redis.port, tls) as port:
        url = f"rediss://localhost:{port}/0"
        async with a_store(url) as store:
            assert "self-signed certificate" in await trouble_with(store)
        spec = StoreSpec(redis_tls=TlsSettings(ca_file=cert).for_redis())
        async with RedisStore(url, namespace="lane", spec=spec) as store:
            assert isinstance(await store.claim(ME, fingerprint()), Granted)


@pytest.mark.slow
async def test_a_redis_in_cluster_mode_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_ports(1)[0])) as server:
        async with Redis.from_url(server.url) as admin:
            await admin.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")  # type: ignore[no-untyped-call]
            await until(lambda: is_up(admin))
        async with a_store(server.url) as store:
            assert "is in cluster mode, in which Lanekeeper cannot use it" in await trouble_with(store)


async def is_up(admin: Redis) -> bool:
    return b"cluster_state:ok" in await admin.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]


async def test_a_wrong_password_is_reported_without_the_password(own_redis: RedisServer) -> None:
    async with told(own_redis, "CONFIG", "SET", "requirepass", "right", back=("CONFIG", "SET", "requirepass", "")):
        for credentials in ("", f":{PASSWORD}@"):
            async with a_store(own_redis.url.replace("//", f"//{credentials}")) as store:
                trouble = await trouble_with(store)
                assert "refuses this user or password" in trouble
                assert PASSWORD not in trouble
        async with a_store(own_redis.url.replace("//", "//:right@")) as store:
            assert isinstance(await store.claim(ME, fingerprint()), Granted)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a Redis"),
        (b":one\r\n", "is not a Redis"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "is still loading its data"),
        (
            b"-MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.\r\n",
            "refuses writes",
        ),
        (b"-ERR unknown command 'EVALSHA'\r\n", "answered: "),
    ],
)
async def test_an_unexpected_answer_of_a_server_is_reported(answer: bytes, what: str) -> None:
    async with listening(lambda _: answer) as url, a_store(url) as store:
        assert what in await trouble_with(store)


async def test_a_claim_that_was_abandoned_does_not_get_the_answer_of_another(redis: RedisServer) -> None:
    async with RedisStore(redis.url, namespace=f"test-{secrets.token_hex(4)}") as store:
        await store.complete(ME, fingerprint(), answered(), token=None)
        for _ in range(20):
            given_up = [asyncio.create_task(store.take("x", 1, limit=1, period=current(60))) for _ in range(5)]
            await asyncio.sleep(0)
            for each in given_up:
                each.cancel()
            assert isinstance(await store.claim(ME, fingerprint()), Ended)


async def test_settings_of_redis_that_may_lose_data_are_warned_of_once(own_redis: RedisServer) -> None:
    policy = ("CONFIG", "SET", "maxmemory-policy")
    async with told(own_redis, *policy, "allkeys-lru", back=(*policy, "noeviction")):
        with capture_logs() as logs:
            async with a_store(own_redis.url) as store:
                await store.probe()
    reasons = [each["reason"] for each in logs if each["event"] == "store.volatile"]

    assert reasons == [
        "maxmemory-policy is allkeys-lru: set noeviction",
        "appendonly is off: what was written is lost with a restart",
    ]
