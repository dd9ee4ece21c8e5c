"""Names that applications use: none is renamed without an entry in the changelog."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

PUBLIC = {
    "lanekeeper.contract.messages": {"Message"},
    "topology.codec.request": {"Request"},
    "lanekeeper.contract.problems": {
        "LanekeeperError", "RequestProblem", "BrokerError", "BrokerUnreachable", "PublishRefused", "Unroutable",
        "ConfirmUnknown", "AccessRefused", "TopologyMismatch", "SettingsError", "PROBLEMS",
    },
    "topology.lanes": {"LaneSpec", "DEFAULT_LANES", "CRITICAL", "NORMAL", "BATCH"},
    "lanekeeper.contract.names": {"Names"},
    "topology.declaration": {"declare"},
    "topology.delays": {"hop", "LEVELS", "UNIT_MS", "MAX_DELAY_MS"},
    "consumers.handler": {"Handler"},
    "consumers.job": {"Job"},
    "consumers.outcomes": {"Answered", "Deferred", "Retried", "Refused", "Buried", "Outcome"},
    "consumers.providers.base": {"Answer", "OnEvent", "Provider", "Usage"},
    "consumers.failures": {
        "ProviderError", "TransientError", "RateLimitedError", "OverloadedError", "SpendLimitError", "RejectedError",
    },
    "service.worker.assembly": {"assemble"},
    "lanekeeper": {
        "Client", "Options", "Final", "Part", "Cancelled", "Depth", "Names", "Tracing", "BodiesUnavailable",
        "BodyError",
        "LanekeeperError", "Problem", "NoReply", "NotEnded", "ReplyLost", "ControlRefused", "BrokerError",
        "BrokerUnreachable", "BrokerBlocked", "PublishRefused", "Unroutable", "ConfirmUnknown", "AccessRefused",
        "TopologyMismatch",
    },
    "service.worker.running": {"run"},
}  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC)
def test_all_public_names_exist(module: str) -> None:
    found = import_module(module)
    assert {name for name in PUBLIC[module] if not hasattr(found, name)} == set()
    assert set(getattr(found, "__all__", PUBLIC[module])) == PUBLIC[module]


@pytest.mark.parametrize("package", ["topology", "consumers", "service"])
def test_importing_a_package_starts_nothing(package: str) -> None:
    assert (import_module(package).__file__ or "").endswith(f"{package}/__init__.py")
    source = Path(import_module(package).__file__ or "").read_text(encoding="utf-8")
    assert ast.unparse(ast.parse(source)) == ast.unparse(ast.parse(f'"""{import_module(package).__doc__}"""'))
