"""docs/simulated.md lists every fault, as `--help` names the markers."""

import pytest

from service.cli import main
from service.simulated.faults import BROKEN, REFUSED
from tests.support.sources import ROOT


def test_the_document_lists_all_faults() -> None:
    rows = [f"| `{name}` | {status}: {message} |" for name, (status, message) in REFUSED.items()]
    rows += [f"| `{name}` | {what} |" for name, what in BROKEN.items()]

    assert "\n".join(rows) in (ROOT / "docs/simulated.md").read_text()


def test_help_names_the_markers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["simulate", "--help"]) == 0
    printed = capsys.readouterr().out

    assert all(marker in printed for marker in ("[[latency: 10s]]", "[[tokens: 200]]", "[[fault: overloaded x2]]"))
