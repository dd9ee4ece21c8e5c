"""No circles of imports, by which a file could be understood only together with all others of the circle."""

from graphlib import TopologicalSorter

import grimp
import pytest

pytestmark = pytest.mark.slow


def test_no_module_imports_itself_through_others_not_even_for_types() -> None:
    graph = grimp.build_graph("lanekeeper", "topology", "consumers", "service", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle
