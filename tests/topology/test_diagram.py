"""`topology diagram` and `topology show` contain everything, and stay readable."""

from pathlib import Path

from lanekeeper.contract.names import Names
from topology.declaration import declare
from topology.diagram import mermaid
from topology.lanes import DEFAULT_LANES

TOPOLOGY = declare(DEFAULT_LANES, names=Names(), broker_version="4.3.6")


def test_the_diagram_in_the_documents_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs/architecture.md"

    assert f"```mermaid\n{mermaid(TOPOLOGY)}```" in page.read_text(encoding="utf-8")
