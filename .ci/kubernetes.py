"""`./dev kubernetes`: whether the overlays of deploy/kubernetes are valid, without a cluster. With
`--print OVERLAY`: its containers of ours as JSON, for `./dev compose-test pods`.

kustomize builds them. Each manifest is compared with Kubernetes' own schema (kubernetes-validate, strict), a
ScaledObject with KEDA's model. Then what no schema knows: references, variables and their order, selectors, times of
ending, security, and whether Lanekeeper takes the settings."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import kubernetes_validate
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject

HOUSE = Path(__file__).parents[1]
FOLDER = HOUSE / "deploy" / "kubernetes"
VERSION = "1.34"
KUSTOMIZE = "v5.8.1"
FROM_OUTSIDE = {"rabbitmq-default-user", "rabbitmq-tls", "rabbitmq-ca"}
"""Secrets of the cluster operator, and of whoever signs certificates."""
NO_SCHEMA = {"RabbitmqCluster": "no package of a registry has its schema"}
CALL_TIMEOUT_S = {"critical": 60, "normal": 120, "batch": 300}
SECRETS = {
    "WORKER_PASSWORD": "w",
    "GATEWAY_PASSWORD": "g",
    "REDIS_PASSWORD": "r",
    "GATEWAY_KEYS": "{}",
    "ANTHROPIC_API_KEY": "k",
}

Manifest = dict[str, Any]


def built(kustomize: str, overlay: str) -> list[Manifest]:
    """The overlay's manifests, with made-up secrets."""
    with tempfile.TemporaryDirectory() as name:
        deploy = Path(name) / "deploy"
        shutil.copytree(HOUSE / "deploy", deploy)
        folder = deploy / "kubernetes" / overlay
        folder.joinpath("secrets.env").unlink(missing_ok=True)
        missing = subprocess.run([kustomize, "build", folder], capture_output=True, text=True)
        if missing.returncode == 0 or "secrets.env" not in missing.stderr:
            raise SystemExit(f"{overlay}: without secrets.env it builds, or does not say what is missing")
        folder.joinpath("secrets.env").write_text("".join(f"{key}={value}\n" for key, value in SECRETS.items()))
        done = subprocess.run([kustomize, "build", folder], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{overlay}: {done.stderr}")
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_schema(manifest: Manifest) -> Iterator[str]:
    if manifest["kind"] in NO_SCHEMA:
        return
    try:
        if manifest["kind"] == "ScaledObject":
            if extra := unknown(manifest, ScaledObject.model_validate(manifest).model_dump(by_alias=True)):
                yield f"unknown: {', '.join(extra)}"
        else:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
    except Exception as error:  # of two libraries
        yield str(error).splitlines()[0][:500]


def unknown(given: Manifest, known: Manifest, place: str = "") -> list[str]:
    """The keys that the model does not know, and so has left out."""
    found = []
    for key, value in given.items():
        if known.get(key) is None:
            found.append(f"{place}{key}")
        elif isinstance(value, dict) and isinstance(known[key], dict):
            found += unknown(value, known[key], f"{place}{key}.")
        elif isinstance(value, list):
            for one, other in zip(value, known[key], strict=True):
                found += unknown(one, other, f"{place}{key}.") if isinstance(one, dict) else []
    return found


def of_references(manifests: list[Manifest]) -> Iterator[str]:
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    names |= {("Secret", name) for name in FROM_OUTSIDE}
    for owner, pod in pods(manifests):
        for kind, name in _referred(pod):
            if (kind, name) not in names:
                yield f"{owner}: no {kind} {name}"
    templates = [pod["metadata"].get("labels", {}) for _, pod in pods(manifests)]
    for each in manifests:
        selector = each.get("spec", {}).get("selector") or {}
        wanted = selector.get("matchLabels", selector) if each["kind"] != "ServiceMonitor" else {}
        if wanted and not any(wanted.items() <= labels.items() for labels in templates):
            yield f"{each['kind']} {each['metadata']['name']}: selects no pod"
        target = each.get("spec", {}).get("scaleTargetRef")
        if target and ("Deployment", target["name"]) not in names:
            yield f"ScaledObject {each['metadata']['name']}: no Deployment {target['name']}"


def _referred(pod: Manifest) -> Iterator[tuple[str, str]]:
    for volume in pod["spec"].get("volumes", ()):
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
    for container in pod["spec"]["containers"]:
        for source in container.get("envFrom", ()):
            yield "ConfigMap", source["configMapRef"]["name"]
        for variable in container.get("env", ()):
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", secret["name"]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for each in manifests:
        if "template" in each.get("spec", {}):
            yield f"{each['kind']} {each['metadata']['name']}", each["spec"]["template"]


def of_pods(manifests: list[Manifest]) -> Iterator[str]:
    for owner, pod in pods(manifests):
        spec = pod["spec"]
        if not spec.get("securityContext", {}).get("runAsNonRoot") or spec.get("automountServiceAccountToken", True):
            yield f"{owner}: may be root, or has a token of Kubernetes' API"
        if spec.get("enableServiceLinks", True):
            yield f"{owner}: gets variables such as LANEKEEPER_GATEWAY_PORT of the Services"
        for container in spec["containers"]:
            locked = container.get("securityContext", {})
            if not locked.get("readOnlyRootFilesystem") or locked.get("allowPrivilegeEscalation", True):
                yield f"{owner}: its root can be written, or its rights can grow"
            if "memory" not in container.get("resources", {}).get("limits", {}):
                yield f"{owner}: no limit of memory"
            if owner.startswith(("Deployment", "StatefulSet")) and "livenessProbe" not in container:
                yield f"{owner}: no probe"


def environments(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, str], list[str], Manifest]]:
    """Of each container of ours: its variables as Kubernetes would expand them, and what is wrong with them."""
    kept = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    for owner, pod in pods(manifests):
        container = pod["spec"]["containers"][0]
        if not container["image"].rpartition("/")[2].startswith("lanekeeper"):
            continue
        found: dict[str, str] = {}
        wrong: list[str] = []
        for source in container.get("envFrom", ()):
            found |= kept["ConfigMap", source["configMapRef"]["name"]]["data"]
        for variable in container.get("env", ()):
            value = variable.get("value", "")
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                data = kept.get(("Secret", secret["name"]), {}).get("data")
                if data is not None and secret["key"] not in data:
                    wrong.append(f"{owner}: Secret {secret['name']} has no {secret['key']}")
                value = base64.b64decode(data.get(secret["key"], "")).decode() if data else "outside"
            for name in re.findall(r"\$\((\w+)\)", value):
                if name not in found:
                    wrong.append(f"{owner}: {variable['name']} uses {name}, which is not set before it")
                value = value.replace(f"$({name})", found.get(name, ""))
            found[variable["name"]] = value
        yield owner, found, wrong, pod


def settings_files(manifests: list[Manifest], pod: Manifest) -> dict[str, str]:
    """The files of the ConfigMap that is mounted at the working directory."""
    container = pod["spec"]["containers"][0]
    for mount in container.get("volumeMounts", ()):
        if mount["mountPath"] == container.get("workingDir"):
            (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
            name = volume["configMap"]["name"]
            return next(
                dict(each["data"])
                for each in manifests
                if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", name)
            )
    return {}


def of_settings(manifests: list[Manifest]) -> Iterator[str]:
    for owner, environ, wrong, pod in environments(manifests):
        yield from wrong
        own = {name: value for name, value in environ.items() if name.startswith(("LANEKEEPER_", "ANTHROPIC_"))}
        command = [
            HOUSE / ".venv/bin/python",
            "-c",
            "from service.config.loading import load_settings; load_settings()",
        ]
        with tempfile.TemporaryDirectory() as folder:
            own["PYTHONPATH"] = str(HOUSE)
            for name, text in settings_files(manifests, pod).items():
                Path(folder, name).write_text(text)
            if file := own.get("LANEKEEPER_TLS__CA_FILE"):
                mounts = [each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]]
                if str(Path(file).parent) not in mounts:
                    yield f"{owner}: nothing is mounted at {file}"
                own["LANEKEEPER_TLS__CA_FILE"] = certifi.where()  # any
            done = subprocess.run(command, env=own, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            yield f"{owner}: {done.stderr.strip().splitlines()[-1]}"
        spec = pod["spec"]
        lane = pod["metadata"]["labels"].get("lanekeeper/lane")
        if lane or "gateway" in owner:
            longest_s = CALL_TIMEOUT_S[lane] if lane else max(CALL_TIMEOUT_S.values())
            grace_s, killed_s = float(environ["LANEKEEPER_GRACE_S"]), spec["terminationGracePeriodSeconds"]
            before_s = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            if not longest_s < grace_s < killed_s - before_s:
                yield (
                    f"{owner}: longest attempt {longest_s} s, grace {grace_s:g} s after {before_s} s, "
                    f"killed after {killed_s} s"
                )
            if "gateway" in owner and not before_s:
                yield f"{owner}: no preStop: it stops to listen while routes still lead to it"


def built_kustomize() -> str:
    """kustomize is built with Go, once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lanekeeper", "bin")
    program = folder / "kustomize"
    if not program.exists():
        if shutil.which("go") is None:
            sys.exit("./dev: kustomize is built with Go, which is not installed")
        print("building kustomize (once, two minutes)", file=sys.stderr)
        environment = {**os.environ, "GOBIN": str(folder)}
        command = ["nice", "go", "install", "-p", "1", f"sigs.k8s.io/kustomize/kustomize/v5@{KUSTOMIZE}"]
        if subprocess.run(command, env=environment, check=False).returncode:
            sys.exit("./dev: kustomize could not be built")
    return str(program)


def show(manifests: list[Manifest]) -> None:
    found = [
        {"owner": owner, "environ": environ, "spec": pod["spec"], "files": settings_files(manifests, pod)}
        for owner, environ, _, pod in environments(manifests)
    ]
    print(json.dumps(found))


def main() -> int:
    failures, kustomize = 0, built_kustomize()
    if sys.argv[1:2] == ["--print"]:
        show(built(kustomize, sys.argv[2]))
        return 0
    for overlay in ("try", "production"):
        manifests = built(kustomize, overlay)
        wrong = [
            f"{each['kind']} {each['metadata']['name']}: {problem}" for each in manifests for problem in of_schema(each)
        ]
        wrong += [*of_references(manifests), *of_pods(manifests), *of_settings(manifests)]
        kinds = Counter(each["kind"] for each in manifests)
        print(f"{overlay}: {len(manifests)} manifests: {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}")
        for kind in kinds.keys() & NO_SCHEMA:
            print(f"  {kind}: not compared with a schema: {NO_SCHEMA[kind]}")
        for each in wrong:
            print(f"  WRONG {each}")
        print(f"  {'FAILED' if wrong else 'valid'}")
        failures += len(wrong)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
