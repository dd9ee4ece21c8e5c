"""`topology diagram` and `topology show` contain everything, and stay readable."""

import re
from pathlib import Path

from lanekeeper.contract.names import Names
from topology.declaration import declare
from topology.diagram import mermaid, render
from topology.lanes import DEFAULT_LANES

TOPOLOGY = declare(DEFAULT_LANES, names=Names(), broker_version="4.3.6")


def test_the_diagram_in_the_documents_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs/architecture.md"

    assert f"```mermaid\n{mermaid(TOPOLOGY)}```" in page.read_text(encoding="utf-8")


FOLDED = re.compile(r"lane\.delay\.|lane\.(\w+\.)?side\.")


def test_the_list_has_one_line_for_each_object_and_explains_the_version() -> None:
    lines = render(TOPOLOGY).splitlines()

    assert lines[0].startswith("RabbitMQ 4.3.6: quorum intakes, priorities strict, 0 to 31; in a cluster, ")
    names = [each.name for each in TOPOLOGY.exchanges] + [each.name for each in TOPOLOGY.queues]
    shown = [name for name in names if not FOLDED.match(name)]
    assert any(line.startswith("  lane.batch.side.00 … lane.batch.side.07: quorum") for line in lines)
    assert [name for name in shown if not any(line.startswith(f"  {name}: ") for line in lines)] == []
    internal = {each.name for each in TOPOLOGY.exchanges if each.internal and each.name in shown}
    assert internal == {line.split(":")[0].strip() for line in lines if ", internal" in line} != set()
    assert len(lines) < 50
