"""`./dev up`: it says how to use what it has started, and leaves nothing behind."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.support.brokers import Vhost
from tests.support.forks import HOUSE
from tests.support.private_broker import LOOPBACK, free_ports
from tests.support.processes import environment
from tests.support.waiting import STARTED_S

UP = (sys.executable, "-m", "tests.support.up")


async def test_its_own_instructions_work_and_ctrl_c_ends_it_quietly(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost)
    del environ["ANTHROPIC_API_KEY"]
    port = free_ports(1)[0]
    up = await asyncio.create_subprocess_exec(*UP, f"--port={port}", cwd=tmp_path, env=environ, stderr=PIPE)
    assert up.stderr is not None
    try:
        said: list[str] = []
        async with asyncio.timeout(STARTED_S):
            while b"Ctrl-C ends it" not in (line := await up.stderr.readline()):
                assert line, said
                said.append(line.decode().strip())
        asking = next(line for line in said if line.startswith("lanekeeper send --stream"))
        asked = await asyncio.create_subprocess_shell(
            f". .cache/up/env; cd {HOUSE}; {asking}", cwd=tmp_path, env=environ, stdout=PIPE
        )
        answer, _ = await asked.communicate()
        second = await asyncio.create_subprocess_exec(*UP, cwd=tmp_path, env=environ, stderr=PIPE)
        _, refused = await second.communicate()
        up.send_signal(signal.SIGINT)
        async with asyncio.timeout(STARTED_S):
            rest = await up.stderr.read()
            code = await up.wait()
    finally:
        if up.returncode is None:
            up.kill()

    assert any(f"http://127.0.0.1:{port}/" in line for line in said)
    assert answer == b"echo: Name three rivers.\n"
    assert (second.returncode, refused) == (1, b"./dev up: it runs already in this folder\n")
    assert (code, rest) == (0, b"")
    assert [file.name for file in (tmp_path / ".cache/up").iterdir()] == ["lock"]


async def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = listener.getsockname()[1]
        up = await asyncio.create_subprocess_exec(
            *UP, f"--port={port}", cwd=tmp_path, env=environment(None), stderr=PIPE
        )
        _, said = await up.communicate()

    assert up.returncode == 1
    assert said.startswith(b"./dev up: port %d is taken: " % port)
