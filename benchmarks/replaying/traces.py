"""Reads the recorded load: every fourth request of a chat service and of a code completion.

`benchmarks/traces/azure-2023-quarter.csv.gz` contains it. `--traces DIR` reads the whole recordings instead, of which
`--quarter` chooses another quarter.
"""

import csv
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[1] / "traces" / "azure-2023-quarter.csv.gz"
FILES: Mapping[str, str] = {"chat": "azure-2023-conv.csv", "code": "azure-2023-code.csv"}
PART = 4
"""One of so many requests of the whole recordings is replayed."""


class Recorded(NamedTuple):
    """One recorded request."""

    at_s: float
    input_tokens: int
    output_tokens: int


Traces = Mapping[str, Sequence[Recorded]]
"""The recorded requests of each service (`chat`, `code`)."""


@lru_cache(maxsize=4)
def packed() -> Traces:
    """The quarter that comes with the repository."""
    found: dict[str, list[Recorded]] = {name: [] for name in FILES}
    with gzip.open(HERE, "rt", newline="") as file:
        for row in csv.DictReader(file):
            found[row["service"]].append(_recorded(row))
    return found


@lru_cache(maxsize=4)
def read(folder: Path, quarter: int = 0) -> Traces:
    """A quarter of the whole recordings, from their folder."""
    found: dict[str, list[Recorded]] = {}
    for name, file in FILES.items():
        with (folder / file).open(newline="") as lines:
            found[name] = [_recorded(row) for row in csv.DictReader(lines)][quarter::PART]
    return found


def pack(traces: Traces) -> bytes:
    """The content of the file that `packed` reads. The same requests give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("service", "at_s", "input_tokens", "output_tokens"))
    writer.writerows(_rows(traces))
    return gzip.compress(text.getvalue().encode(), 9, mtime=0)


def _rows(traces: Traces) -> Iterator[tuple[str, str, int, int]]:
    for name, requests in traces.items():
        for request in requests:
            yield name, f"{request.at_s:.3f}", request.input_tokens, request.output_tokens


def _recorded(row: Mapping[str, str]) -> Recorded:
    return Recorded(float(row["at_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
