"""`topology diagram` and `topology show` contain everything, and stay readable."""

import re
from pathlib import Path

from lanekeeper.contract.names import Names
from topology.declaration import declare
from topology.diagram import mermaid, render
from topology.lanes import DEFAULT_LANES

TOPOLOGY = declare(DEFAULT_LANES, names=Names(), broker_version="4.3.6")
FOLDED = re.compile(r"lane\.delay\.|lane\.(\w+\.)?side\.")


def test_the_diagram_shows_every_queue_and_folds_the_delay_cascade() -> None:
    picture = mermaid(TOPOLOGY)

    shown = [each.name for each in TOPOLOGY.queues if not FOLDED.match(each.name)]
    assert [name for name in shown if f'"{name}"' not in picture] == []
    assert picture.count("lane.delay.") == 2
    assert picture.count('"lane.&lt;lane&gt;.side.00 … lane.&lt;lane&gt;.side.07"') == 1
    assert len(picture.splitlines()) < 45


def test_the_diagram_in_the_readme_is_up_to_date() -> None:
    readme = Path(__file__).parents[2] / "README.md"

    assert f"```mermaid\n{mermaid(TOPOLOGY)}```" in readme.read_text(encoding="utf-8")


def test_the_list_has_one_line_for_each_object_and_explains_the_version() -> None:
    lines = render(TOPOLOGY).splitlines()

    assert lines[0].startswith("RabbitMQ 4.3.6: quorum intakes, priorities strict, 0 to 31; in a cluster, ")
    names = [each.name for each in TOPOLOGY.exchanges] + [each.name for each in TOPOLOGY.queues]
    shown = [name for name in names if not FOLDED.match(name)]
    assert any(line.startswith("  lane.batch.side.00 … lane.batch.side.07: quorum") for line in lines)
    assert [name for name in shown if not any(line.startswith(f"  {name}: ") for line in lines)] == []
    assert len(lines) < 45


def test_diagram_and_list_use_the_namespace() -> None:
    other = declare(DEFAULT_LANES, names=Names("acme"), broker_version="3.10.8")

    assert "lane." not in mermaid(other).replace("lane&gt;.", "")
    assert "acme.critical: classic" in render(other)
    assert "lane.critical" not in render(other)


def test_the_list_says_which_exchanges_are_internal() -> None:
    lines = render(TOPOLOGY).splitlines()
    shown = [each for each in TOPOLOGY.exchanges if any(line.startswith(f"  {each.name}: ") for line in lines)]
    internal = [each.name for each in shown if f"  {each.name}: {each.type}, internal" in "\n".join(lines)]

    assert internal == [each.name for each in shown if each.internal]
    assert shown != []
