"""`./dev compose-test`: the image and the compose files on Docker's engine. Its parts, all by default:

image     built from the Dockerfile; runs with a read-only root, not as root, becomes healthy, ends on SIGTERM with 0
server    docker-compose.yml with its profile `observe`, as docs/install.md says: a request is sent, its trace found in
          Jaeger, Prometheus scrapes all and no alert fires; SIGTERM answers what runs; what is wrong is refused
example   the same with examples/compose: a lane of one's own, a schedule whose webhook comes, a picture of 1 MB
pods      the containers of deploy/kubernetes/try as kustomize renders them: command, environment, limit, probes
cluster   deploy/cluster: while requests are published, a broker node and a worker are killed: none may be lost

Images that no registry gives are made from Debian's packages and Jaeger's Go module. There is none for Grafana."""

import argparse
import asyncio
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support import waiting
from tests.support.engine import Engine, Steps, Unavailable, install
from tests.support.jaeger import asked
from tests.support.jaeger_build import BuildFailed, NotToBeHad, jaeger
from tests.support.keeper import IMAGE_SCRIPT
from tests.support.private_broker import LOCAL, free_ports
from tests.support.requester import Ledger

Found = TypeVar("Found")
HOUSE = Path(__file__).parents[2]
SERVER = HOUSE / "docker-compose.yml"
EXAMPLE = HOUSE / "examples" / "compose" / "docker-compose.yml"
CLUSTER = HOUSE / "deploy" / "cluster" / "docker-compose.yml"
IMAGE = "lanekeeper:compose-test"
BASE = "debian-python:3.11"
REQUESTS = 300
PREFIX = "lanekeepertest"
SPANS = {"ask", "send lane.requests", "wait lane.critical", "process lane.critical", "chat claude-sonnet-5-5"}
OBSERVER = """
FROM {base}
COPY {program} busybox /usr/bin/
RUN ln -s busybox /usr/bin/wget && install -d -o nobody -g nogroup /prometheus
USER nobody
ENV JAEGER_LISTEN_HOST=0.0.0.0
ENTRYPOINT ["{program}"]
CMD {options}
"""
"""Jaeger or Prometheus, with the entry point and options of the official image."""
PROMETHEUS = ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
RUNNING = """
import urllib.request
text = urllib.request.urlopen("http://127.0.0.1:8080/metrics").read().decode()
print(sum(float(each.split()[-1]) for each in text.splitlines() if each.startswith("lanekeeper_lane_running{")))
"""


def docker(*line: str, check: bool = True, within_s: float = 120) -> str:
    done = subprocess.run(["docker", *line], capture_output=True, text=True, timeout=within_s)
    assert not check or done.returncode == 0, f"docker {' '.join(line)}: {done.stderr[-2000:]}"
    return done.stdout.strip()


def has(image: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0


def until(condition: Callable[[], Found], what: str, *, within_s: float = 180) -> Found:
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.5)  # polling: the engine notifies nobody
    return found


# ---- images ----------------------------------------------------------------------------------------------------------


def official(variable: str) -> str:
    """The image that docker-compose.yml names."""
    found = re.search(rf"\$\{{{variable}:-([^}}]+)\}}", SERVER.read_text())
    assert found, variable
    return found[1]


def image(variable: str, local: str, make: Callable[[], object]) -> str:
    """The official image if it is here, else the local one, which is made if need be."""
    if has(official(variable)):
        return official(variable)
    if not has(local):
        make()
    return local


def base_image() -> str:
    script = HOUSE / "tests/containers/base-image"
    return image("PYTHON_IMAGE", BASE, lambda: subprocess.run([script], check=True))


def make_observer(name: str, *, program: Path, options: list[str]) -> None:
    if shutil.which("busybox") is None:
        install(Steps(), "busybox")  # for the wget of Jaeger's health check
    with tempfile.TemporaryDirectory() as folder:
        for each in (program, Path(shutil.which("busybox") or "")):
            shutil.copy(each, folder)
        text = OBSERVER.format(base=base_image(), program=program.name, options=json.dumps(options))
        Path(folder, "Dockerfile").write_text(text)
        docker("build", f"--tag={name}", folder)


def make_prometheus(name: str) -> None:
    if shutil.which("prometheus") is None:
        install(Steps(), "prometheus")
    make_observer(name, program=Path(shutil.which("prometheus") or ""), options=PROMETHEUS)


def images() -> dict[str, str]:
    redis = "debian-redis:local"
    return {
        "SERVICE_IMAGE": IMAGE,
        "RABBITMQ_IMAGE": image("RABBITMQ_IMAGE", LOCAL, lambda: subprocess.run([IMAGE_SCRIPT, "4.3"], check=True)),
        "REDIS_IMAGE": image("REDIS_IMAGE", redis, lambda: docker("tag", base_image(), redis)),
    }


def observers() -> dict[str, str]:
    mine, watch = "debian-jaeger:local", "debian-prometheus:local"
    return {
        "JAEGER_IMAGE": image("JAEGER_IMAGE", mine, lambda: make_observer(mine, program=jaeger(), options=[])),
        "PROMETHEUS_IMAGE": image("PROMETHEUS_IMAGE", watch, lambda: make_prometheus(watch)),
    }


def build() -> str:
    """Build the image; returns its size."""
    base = base_image()
    line = ("build", "--network=host", f"--build-arg=PYTHON_IMAGE={base}", f"--tag={IMAGE}", str(HOUSE))
    docker(*line, within_s=1200)
    return f"{int(docker('image', 'inspect', '--format={{.Size}}', IMAGE)) / 1e6:.0f} MB, of which {base} " + (
        f"{int(docker('image', 'inspect', '--format={{.Size}}', base)) / 1e6:.0f} MB"
    )


LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")


def check_image() -> None:
    assert docker("run", "--rm", *LOCKED, "--entrypoint=id", IMAGE, "-u") == "10001", "it is root"
    assert docker("run", "--rm", *LOCKED, IMAGE, "--version").startswith("lanekeeper ")
    name = f"{PREFIX}-image"
    docker("rm", "--force", name, check=False)
    line = ("--detach", f"--name={name}", *LOCKED, "--health-interval=2s", IMAGE, "simulate", "--port", "8080")
    docker("run", *line)
    try:
        until(lambda: health(name) == "healthy", f"{name} is healthy")
        began = time.monotonic()
        docker("stop", "--time=30", name)
        code = docker("inspect", "--format={{.State.ExitCode}}", name)
        assert code == "0", f"SIGTERM: exit code {code}: {docker('logs', name)[-500:]}"
        assert time.monotonic() - began < 29, "it was killed"
    finally:
        docker("rm", "--force", name)


def health(name: str) -> str:
    return docker("inspect", "--format={{if .State.Health}}{{.State.Health.Status}}{{end}}", name, check=False)


# ---- compose ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compose:
    """compose's command over some files, with the settings in `env_file`."""

    tool: tuple[str, ...]
    files: tuple[Path, ...]
    env_file: Path

    def run(self, *line: str, within_s: float = 600) -> subprocess.CompletedProcess[str]:
        files = [f"--file={each}" for each in self.files]
        command = [*self.tool, f"--project-name={PREFIX}", f"--env-file={self.env_file}", *files, *line]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_HOST") if name in os.environ}
        return subprocess.run(
            command, cwd=self.env_file.parent, env=kept, capture_output=True, text=True, timeout=within_s
        )

    def __call__(self, *line: str) -> str:
        done = self.run(*line)
        assert done.returncode == 0, f"compose {' '.join(line)}: {done.stderr[-3000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        return self("ps", "--quiet", service).strip()

    def healthy(self, *services: str) -> None:
        until(lambda: all(health(self.container(each)) == "healthy" for each in services), f"healthy: {services}")

    def send(self, prompt: str) -> subprocess.CompletedProcess[str]:
        return self.run("run", "--rm", "-T", "cli", "send", prompt)


@contextmanager
def composed(*files: Path, settings: Mapping[str, str]) -> Iterator[Compose]:
    tool = ["docker", "compose"]
    if subprocess.run([*tool, "version"], capture_output=True).returncode:
        tool = ["docker-compose"]
        if shutil.which(tool[0]) is None:
            install(Steps(), tool[0])
    with tempfile.TemporaryDirectory() as folder:
        # Volumes of docker-compose.yml have fixed names: not those of a system that runs on this machine.
        volumes = {name: {"name": f"{PREFIX}_{name}"} for name in re.findall(r"(\w+): \{name: ", files[0].read_text())}
        Path(folder, "volumes.json").write_text(json.dumps({"volumes": volumes}))
        Path(folder, ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        own = (Path(folder, "volumes.json"),) if volumes else ()
        compose = Compose(tuple(tool), (*files, *own), Path(folder, ".env"))
        every = ("--profile=cli", "--profile=gateway", "--profile=observe")
        compose.run(*every, "down", "--volumes", "--timeout=5")  # of a run that was killed
        try:
            yield compose
        finally:
            compose(*every, "down", "--volumes", "--timeout=5")


def passwords(*names: str) -> dict[str, str]:
    return {name: secrets.token_hex(16) for name in names}


def refuses_without_passwords(compose: Compose) -> None:
    """Without one of them compose says its name and does nothing."""
    text = compose.env_file.read_text()
    for name in re.findall(r"^(\w+_PASSWORD|ERLANG_COOKIE)=", text, re.MULTILINE):
        compose.env_file.write_text(re.sub(f"^{name}=.*\n", "", text, flags=re.MULTILINE))
        refused = compose.run("up", "--no-start", "--no-build")
        assert refused.returncode, f"starts without {name}"
        assert name in refused.stderr, refused.stderr
    compose.env_file.write_text(text)
    assert not docker("ps", "--all", "--quiet", f"--filter=label=com.docker.compose.project={PREFIX}")


# ---- one server ------------------------------------------------------------------------------------------------------


def fetched(url: str) -> Any:
    """What Prometheus's API answers; nothing while it starts."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return json.load(answer)["data"]
    except OSError:
        return {}


def check_server() -> None:
    ports = dict(zip(("AMQP", "MANAGEMENT", "JAEGER", "PROMETHEUS", "GRAFANA"), free_ports(5), strict=True))
    settings = {
        **passwords("RABBITMQ_PASSWORD", "WORKER_PASSWORD", "CLI_PASSWORD", "REDIS_PASSWORD"),
        **images(),
        **observers(),
        **{f"{name}_PORT": str(port) for name, port in ports.items()},
        "SERVE_OPTIONS": "--simulate",
    }
    with composed(SERVER, settings=settings) as compose:
        refuses_without_passwords(compose)
        began = time.monotonic()
        compose("up", "--detach", "--no-build")
        observe = ["prometheus", "grafana"] if has(official("GRAFANA_IMAGE")) else ["prometheus"]
        compose("--profile=observe", "up", "--detach", "--no-build", *observe)
        compose.healthy("rabbitmq", "redis", "jaeger", "lanekeeper")
        print(f"server: healthy after {time.monotonic() - began:.0f} s", flush=True)
        check_request(compose, jaeger_port=ports["JAEGER"])
        check_prometheus(f"http://127.0.0.1:{ports['PROMETHEUS']}/api/v1")
        print(
            f"server: with {' and '.join(observe)}: all targets are up, every rule is evaluated, no alert", flush=True
        )
        check_stop(compose)
        check_other_arguments(compose)


def check_request(compose: Compose, *, jaeger_port: int) -> None:
    worker = compose.container("lanekeeper")
    assert docker("exec", worker, "id", "-u") == "10001", "it is root"
    assert docker("inspect", "--format={{.HostConfig.ReadonlyRootfs}}", worker) == "true"
    sent = compose.send("Name three rivers.")
    assert "echo: Name three rivers." in sent.stdout, sent.stderr
    link = re.search(rf"http://localhost:{jaeger_port}/trace/([0-9a-f]{{32}})", sent.stderr)
    assert link, f"no link to the trace: {sent.stderr}"
    query = f"http://127.0.0.1:{jaeger_port}"
    until(lambda: {each.name for each in asked(query, link[1])} >= SPANS, f"{SPANS} in Jaeger", within_s=60)
    print("server: a request is answered, its trace is in Jaeger, with the wait in the queue", flush=True)


def check_prometheus(url: str) -> None:
    def scraped() -> bool:
        targets = fetched(f"{url}/targets").get("activeTargets", [])
        return {each["labels"]["job"] for each in targets if each["health"] == "up"} == {"lanekeeper", "rabbitmq"}

    def evaluated() -> bool:
        rules = [rule for group in fetched(f"{url}/rules").get("groups", []) for rule in group["rules"]]
        states = {rule.get("state", "inactive") for rule in rules}  # pending: a worker that has just started
        return {rule["health"] for rule in rules} == {"ok"} and states == {"inactive"}

    until(scraped, "all targets are up", within_s=60)
    until(evaluated, "every rule is evaluated, no alert pending", within_s=60)
    files = {group["file"] for group in fetched(f"{url}/rules")["groups"]}
    assert files == {"/etc/prometheus/rules.yml", "/etc/prometheus/scaling.yml"}, files
    fired = fetched(f"{url}/query?query=last_over_time(ALERTS%7Balertstate=%22firing%22%7D%5B10m%5D)")["result"]
    assert not fired, fired
    ready = fetched(f"{url}/query?query=lanekeeper_ready")["result"]
    assert [each["value"][1] for each in ready] == ["1"], ready


def check_stop(compose: Compose) -> None:
    worker = compose.container("lanekeeper")
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(compose.send, "slow [[latency: 8s]]")
        until(lambda: docker("exec", worker, "python3", "-c", RUNNING, check=False) == "1.0", "a request runs")
        began = time.monotonic()
        compose("stop", "lanekeeper")
        took_s = time.monotonic() - began
        code = docker("inspect", "--format={{.State.ExitCode}}", worker)
        assert code == "0", f"exit code {code} after {took_s:.0f} s"
        assert "echo: slow" in running.result().stdout, running.result().stderr
    print(f"server: SIGTERM: a running request is answered, exit code 0 after {took_s:.0f} s", flush=True)


def check_other_arguments(compose: Compose) -> None:
    """Queues that exist with other arguments are refused before anything is changed."""
    other = ("-e", "LANEKEEPER_LANES__NORMAL__MAX_LENGTH=5", "-e", "LANEKEEPER_LANES__VIP__RANK=5")
    refused = compose.run("run", "--rm", "-T", *other, "topology")
    said = refused.stdout + refused.stderr
    assert refused.returncode, said
    assert re.search(r"lane\.normal .* another x-max-length", said), said
    queues = docker("exec", compose.container("rabbitmq"), "rabbitmqctl", "--quiet", "list_queues", "name")
    assert "lane.normal" in queues, queues
    assert "lane.vip" not in queues, queues
    print("server: queues with other arguments are refused, and nothing is declared", flush=True)


# ---- with settings ---------------------------------------------------------------------------------------------------

PICTURE = """
import base64, json, os, sys, urllib.request
url, key = sys.argv[1:]
source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(os.urandom(1_000_000)).decode()}
content = [{"type": "image", "source": source}, {"type": "text", "text": "what is it"}]
body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": content}]}
headers = {"x-api-key": key, "content-type": "application/json"}
request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=60).status)
"""
"""Asks about a picture that is too large for a message, and so goes by the store of bodies."""


def new_key() -> tuple[str, str]:
    """A key for the gateway, and the setting with its hash."""
    text = docker("run", "--rm", *LOCKED, IMAGE, "key", "new", "crm")
    key, hashed = re.search(r"lane-\S+", text), re.search(r"gateway\.keys\.(\w+)", text)
    assert key, text
    assert hashed, text
    return key[0], json.dumps({hashed[1]: {"tenant": "crm"}})


def check_example() -> None:
    names = ("AMQP", "MANAGEMENT", "JAEGER", "GATEWAY")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    key, keys = new_key()
    settings = {
        **passwords("RABBITMQ_PASSWORD", "WORKER_PASSWORD", "CLI_PASSWORD", "REDIS_PASSWORD", "GATEWAY_PASSWORD"),
        **images(),
        "JAEGER_IMAGE": observers()["JAEGER_IMAGE"],
        **{f"{name}_PORT": str(port) for name, port in ports.items()},
        "SERVE_OPTIONS": "--simulate",
        "SETTINGS_FOLDER": str(EXAMPLE.parent),
        "GATEWAY_KEYS": keys,
    }
    with composed(SERVER, EXAMPLE, settings=settings) as compose:
        compose("--profile=gateway", "up", "--detach", "--no-build")
        compose.healthy("lanekeeper", "gateway")
        sent = compose.run("run", "--rm", "-T", "cli", "send", "--lane", "vip", "Name three rivers.")
        assert "echo: Name three rivers." in sent.stdout, sent.stderr
        gateway = compose.container("gateway")
        assert docker("exec", gateway, "python3", "-c", PICTURE, "http://127.0.0.1:8080", key) == "200"
        until(lambda: '{"words": 3}' in compose("logs", "receiver").replace('":3', '": 3'), "the schedule's webhook")
    print("example: an own lane answers, a picture of 1 MB is asked about, the schedule's webhook has come", flush=True)


# ---- pods ------------------------------------------------------------------------------------------------------------

SERVICE_VARIABLES = {
    "LANEKEEPER_GATEWAY_PORT": "tcp://10.0.0.1:80",
    "LANEKEEPER_GATEWAY_SERVICE_HOST": "10.0.0.1",
    "LANEKEEPER_GATEWAY_PORT_80_TCP": "tcp://10.0.0.1:80",
}
"""What a kubelet adds to a pod with `enableServiceLinks` for the Service `lanekeeper-gateway`."""
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)"


def check_pods() -> None:
    printed = subprocess.run([HOUSE / "dev", "kubernetes", "--print", "try"], stdout=subprocess.PIPE, check=True)
    pods = {each["owner"]: each for each in json.loads(printed.stdout)}
    key, keys = new_key()
    network, made = f"{PREFIX}-pods", [f"{PREFIX}-pod-rabbitmq", f"{PREFIX}-pod-redis"]
    volume = f"{PREFIX}-pods-bodies"
    docker("network", "create", network)
    try:
        with tempfile.TemporaryDirectory() as folder:
            start_stores(network, pods, *made)
            job = "Job topology"
            until(lambda: start_pod(pods[job], network, volume, Path(folder, "job"), wait=True) == "0", job)
            for owner, pod in pods.items():
                if owner != job:
                    pod["environ"] |= {"LANEKEEPER_GATEWAY__KEYS": keys} if "gateway" in owner else {}
                    made.append(start_pod(pod, network, volume, Path(folder, owner)))
            for name, (owner, pod) in zip(made[2:], ((o, p) for o, p in pods.items() if o != job), strict=True):
                container = pod["spec"]["containers"][0]
                for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                    until(lambda n=name, p=container[kind]: probed(n, p), f"{owner}: {kind}")  # type: ignore[misc]
            gateway = made[2 + [owner for owner in pods if owner != job].index("Deployment gateway")]
            assert docker("exec", gateway, "python3", "-c", PICTURE, "http://127.0.0.1:8080", key) == "200"
            for name in made[2:]:
                docker("stop", "--time=60", name)
                state = docker("inspect", "--format={{.State.ExitCode}} {{.State.OOMKilled}}", name)
                assert state == "0 false", f"{name}: {state}: {docker('logs', name)[-500:]}"
        print(f"pods: {len(pods)} of the overlay `try` run and are ready, a picture of 1 MB is asked about", flush=True)
    finally:
        docker("rm", "--force", "--volumes", *made, check=False)
        docker("volume", "rm", volume, check=False)
        docker("network", "rm", network, check=False)


def start_stores(network: str, pods: Mapping[str, Any], rabbitmq: str, redis: str) -> None:
    """The broker and the store that the pods' variables name."""
    found = images()
    user = pods["Job topology"]["environ"]
    login = [
        f"--env=RABBITMQ_DEFAULT_{name}={user[of]}" for name, of in (("USER", "ADMIN"), ("PASS", "ADMIN_PASSWORD"))
    ]
    line = ("run", "--detach", f"--network={network}")
    docker(*line, f"--name={rabbitmq}", "--network-alias=rabbitmq", *login, found["RABBITMQ_IMAGE"])
    password = pods["Deployment gateway"]["environ"]["REDIS_PASSWORD"]
    server = ["redis-server", "--requirepass", password, "--appendonly", "yes", "--dir", "/tmp"]
    docker(*line, f"--name={redis}", "--network-alias=redis", "--tmpfs=/tmp", found["REDIS_IMAGE"], *server)
    check = ("rabbitmq-diagnostics", "--quiet", "check_port_connectivity")
    until(lambda: ready(rabbitmq, *check), "the broker runs")


def ready(name: str, *command: str) -> bool:
    return subprocess.run(["docker", "exec", name, *command], capture_output=True).returncode == 0


def start_pod(pod: Mapping[str, Any], network: str, volume: str, folder: Path, *, wait: bool = False) -> str:
    """Its first container as a kubelet would start it; returns its name or, with `wait`, its exit code."""
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in pod["files"].items():
        Path(folder, name).write_text(text)
    folder.chmod(0o755)
    mounts = {"settings": f"--volume={folder}:{{}}:ro", "bodies": f"--volume={volume}:{{}}", "tmp": "--tmpfs={}"}
    environ = {**pod["environ"], **(SERVICE_VARIABLES if spec.get("enableServiceLinks", True) else {})}
    context, name = spec["securityContext"], f"{PREFIX}-pod-{folder.name.rpartition(' ')[2]}"
    line = [
        *(f"--name={name}", f"--network={network}", "--read-only", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges:true", f"--user={context['runAsUser']}:{context['runAsGroup']}"),
        f"--memory={container['resources']['limits']['memory'].removesuffix('i').lower()}",
        f"--workdir={container['workingDir']}",
        *(f"--env={key}={value}" for key, value in environ.items()),
        *(mounts[each["name"]].format(each["mountPath"]) for each in container["volumeMounts"]),
        *(["--entrypoint", container["command"][0]] if "command" in container else []),
        *(IMAGE, *container.get("command", [])[1:], *container["args"]),
    ]
    docker("rm", "--force", name, check=False)
    if wait:
        done = subprocess.run(["docker", "run", "--rm", *line], capture_output=True, text=True, timeout=120)
        print(done.stderr[-1000:] if done.returncode else "pods: the job has declared everything", flush=True)
        return str(done.returncode)
    docker("run", "--detach", *line)
    return name


def probed(name: str, probe: Mapping[str, Any]) -> bool:
    return ready(name, "python3", "-c", PROBE, f"http://127.0.0.1:8080{probe['httpGet']['path']}")


# ---- a cluster -------------------------------------------------------------------------------------------------------


def check_cluster() -> None:
    ports = free_ports(6)
    settings = {
        **passwords("RABBITMQ_PASSWORD", "WORKER_PASSWORD", "CLI_PASSWORD", "REDIS_PASSWORD", "ERLANG_COOKIE"),
        **images(),
        "SERVE_OPTIONS": "--simulate",
        "LANEKEEPER_PROFILE": "",  # the test's requests have no user_id
        **{f"AMQP_PORT_{n + 1}": str(ports[n]) for n in range(3)},
        **{f"MANAGEMENT_PORT_{n + 1}": str(ports[n + 3]) for n in range(3)},
    }
    with composed(CLUSTER, settings=settings) as compose:
        refuses_without_passwords(compose)
        began = time.monotonic()
        compose("up", "--detach", "--no-build")
        compose.healthy("worker1", "worker2")
        print(f"cluster: three brokers, Redis, two workers healthy after {time.monotonic() - began:.0f} s", flush=True)
        url = f"amqp://lanekeeper:{settings['RABBITMQ_PASSWORD']}@127.0.0.1:{ports[0]}/"
        seen = asyncio.run(load(url, compose))
        print(f"cluster: a broker node and a worker were killed, nothing lost: {json.dumps(seen)}", flush=True)


async def load(amqp_url: str, compose: Compose) -> dict[str, object]:
    ledger = Ledger(amqp_url)
    began = time.monotonic()
    async with ledger.writing(), ledger.reading():
        for number in range(REQUESTS):
            lane = ("critical", "normal", "batch")[number % 3]
            headers = {"x-lane-no-batch": True} if lane == "batch" else {}
            await ledger.ask(lane, f"{number} [[latency: 1s]]", id=f"c-{number}", headers=headers)
            if number == REQUESTS // 3:
                await asyncio.to_thread(compose, "kill", "rabbitmq2")
            if number == 2 * REQUESTS // 3:
                await asyncio.to_thread(compose, "kill", "worker1")
        await waiting.until(lambda: not ledger.lost, within_s=240)
    ledger.check()
    return {"requests": len(ledger.confirmed), "replies twice": ledger.repeated, "s": round(time.monotonic() - began)}


PARTS = ("image", "server", "example", "pods", "cluster")


def main(parts: list[str]) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        engine = Engine(Path(name), steps=Steps())
        try:
            engine.ensure()
            size = build()
            print(f"image: built in {time.monotonic() - began:.0f} s, {size}", flush=True)
            if "image" in parts:
                check_image()
                print("image: read-only, not root, healthy, ends on SIGTERM with 0", flush=True)
            if "server" in parts:
                check_server()
            if "example" in parts:
                check_example()
            if "pods" in parts:
                check_pods()
            if "cluster" in parts:
                check_cluster()
        finally:
            engine.stop()
    print(f"{len(parts)} passed, 0 failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="./dev compose-test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=f"only these of {', '.join(PARTS)}")
    try:
        given = parser.parse_args().part
        if unknown := set(given) - set(PARTS):
            parser.error(f"no such part: {', '.join(unknown)}")  # `choices` refuses no parts at all
        main(given or list(PARTS))
    except (AssertionError, subprocess.SubprocessError, TimeoutError, Unavailable, NotToBeHad, BuildFailed) as error:
        sys.exit(f"FAILED: {error}")
