"""Sketches of waits and run times, as workers send them in their answers to a status question: the quantiles of several
workers together can be read from merged sketches, not from the quantiles of each."""

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from typing import Final

from ddsketch import DDSketch
from ddsketch.ddsketch import BaseDDSketch
from ddsketch.pb.ddsketch_pb2 import DDSketch as Packed
from ddsketch.pb.proto import DDSketchProto
from google.protobuf.message import DecodeError

from consumers.slots.activity import ACCURACY

SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SKETCH_BYTES: Final = 64 * 1024
"""More than the sketch of any waits."""


def packed(sketch: BaseDDSketch) -> str:
    """A sketch as text, for a worker's answer."""
    data: bytes = DDSketchProto.to_proto(sketch).SerializeToString()  # type: ignore[no-untyped-call]
    return base64.b64encode(zlib.compress(data)).decode()


def unpacked(text: object) -> BaseDDSketch | None:
    """The sketch in this text; None if there is none, or another version's."""
    if not isinstance(text, str) or len(text) > SKETCH_BYTES:
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text), SKETCH_BYTES)
        sketch: BaseDDSketch = DDSketchProto.from_proto(Packed.FromString(data))  # type: ignore[no-untyped-call]
    except (binascii.Error, zlib.error, ValueError, DecodeError):
        return None
    return sketch


def merged(texts: Iterable[object]) -> BaseDDSketch:
    """One sketch of all values in these; what cannot be read is left out."""
    total = DDSketch(ACCURACY)
    for text in texts:
        if (sketch := unpacked(text)) is not None:
            try:
                total.merge(sketch)
            except ValueError:  # of a version with another accuracy
                continue
    return total


def quantiles(sketch: BaseDDSketch) -> Mapping[str, int | None]:
    """The quantiles of `SHARES`, and of how many values (`count`)."""
    found = {name: sketch.get_quantile_value(share) for name, share in SHARES.items()}
    return {name: None if value is None else round(value) for name, value in found.items()} | {
        "count": round(sketch.count)
    }
