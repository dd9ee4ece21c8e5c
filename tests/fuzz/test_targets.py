"""A short version of `./dev fuzz`: the corpus, mutations of it, and random bytes."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS
from tests.support.examples import examples

CORPUS = Path(__file__).with_name("corpus")
EXAMPLES = 100
SEEDS = {name: sorted((CORPUS / name).iterdir()) for name in TARGETS}


@pytest.mark.parametrize(
    ("target", "file"),
    [pytest.param(name, file, id=f"{name}/{file.name}") for name, files in SEEDS.items() for file in files],
)
def test_each_input_that_once_failed_passes(target: str, file: Path) -> None:
    TARGETS[target](file.read_bytes())


@st.composite
def neighbours(draw: st.DrawFn, target: str) -> bytes:
    """Mutations of a seed: a few places are removed, doubled or overwritten."""
    data = bytearray(draw(st.sampled_from(SEEDS[target])).read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 12)))
        data[at:end] = draw(st.binary(max_size=8) | st.just(bytes(data[at:end]) * 2))
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_mutations_of_the_corpus_raise_only_typed_errors(target: str) -> None:
    @settings(max_examples=examples(EXAMPLES), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=neighbours(target))
    def run(data: bytes) -> None:
        TARGETS[target](data)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes_raise_only_typed_errors(target: str) -> None:
    @settings(max_examples=examples(EXAMPLES), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.binary(max_size=300))
    def run(data: bytes) -> None:
        TARGETS[target](data)

    run()
