"""The tokens of images and documents, by Anthropic's documented rules."""

import json
import random
import struct
import zlib
from base64 import b64encode
from binascii import a2b_base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.simulated.faults import Refusal
from service.simulated.messages import read_request
from tests.support.pictures import jpeg, pdf, picture, png
from topology.codec import media
from topology.codec.media import (
    HIGH,
    MOST_PAGES,
    NO_MEDIA,
    PAGE_TOKENS,
    STANDARD,
    STEPS,
    Media,
    count,
)

OLD, NEW = "claude-haiku-4-5-20251001", "claude-sonnet-5-5"


def body(*blocks: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def tokens(*blocks: object, model: str = NEW) -> int:
    return count(body(*blocks)).tokens(model)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(30)


def webp(kind: bytes, size: bytes) -> bytes:
    return b"RIFF" + bytes(4) + b"WEBP" + kind + bytes(4) + size


def lossy(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width | 0x4000, height))


def lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(5))


def extended(width: int, height: int) -> bytes:
    return webp(b"VP8X", bytes(4) + struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3])


def progressive(width: int, height: int) -> bytes:
    return jpeg(width, height, frame=0xC2, exif=200_000)


@pytest.mark.parametrize("made", [png, jpeg, progressive, gif, lossy, lossless, extended])
@pytest.mark.parametrize(
    ("size", "standard", "high"), [((56, 28), 2, 2), ((1000, 700), 900, 900), ((3840, 2160), 1560, 4784)]
)
def test_an_image_counts_by_its_size_in_pixels(made: Any, size: tuple[int, int], standard: int, high: int) -> None:
    """The documented examples: 3840x2160 is scaled to 1456x819, or 2576x1449."""
    assert tokens(picture(made(*size)), model=OLD) == pytest.approx(standard, rel=0.01)
    assert tokens(picture(made(*size)), model=NEW) == high


def test_an_image_of_600_kb_counts_as_no_more_than_any_other() -> None:
    found = count(body({"type": "text", "text": "?"}, picture(png(2000, 1500, size=600_000))))

    assert found.bytes == pytest.approx(800_000, rel=0.01)
    assert found.tokens(OLD) == STANDARD.tokens
    assert found.tokens(NEW) == 72 * 54


def test_a_model_from_4_7_on_sees_more() -> None:
    seen = [
        *("claude-opus-4-6", "claude-3-5-sonnet-20241022", "claude-sonnet-4-20250514", "claude-opus-4-5@20251101"),
        "us.anthropic.claude-haiku-4-5-20251001-v1:0",
    ]
    assert {media.resolution(model) for model in seen} == {STANDARD}
    seen = ["claude-opus-4-7", "claude-opus-5", "claude-fable-5-2", "anthropic.claude-haiku-5-5-v1:0", "a-new-one"]
    assert {media.resolution(model) for model in seen} == {HIGH}


@pytest.mark.parametrize(
    "data",
    ["", "x", "not base64 at all", "Grüße", "=" * 100, b64encode(b"\xff\xd8" + b"\xff" * 99_999).decode(),
     b64encode(png(0, 0)).decode(), b64encode(jpeg(9, 9)[:9]).decode(), b64encode(b"RIFF____WEBPVP9 ").decode()],
)  # fmt: skip
def test_an_image_without_a_size_counts_as_the_largest(data: str) -> None:
    assert tokens({"type": "image", "source": {"type": "base64", "data": data}}) == HIGH.tokens


def test_an_image_by_its_address_counts_as_the_largest() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://images.test/one.png"}}
    by_id = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}

    assert count(body(by_url, by_id)) == Media(0, 2 * STANDARD.tokens, 2 * HIGH.tokens)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("filling", [0, 3_000_000])
def test_a_pdf_counts_by_its_pages(packed: bool, filling: int) -> None:
    assert tokens(pdf(17, packed=packed, filling=filling)) == 17 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("raw", "pages"),
    [
        (b"<< /Type /Outlines /Count 9 >> << /Type /Pages /Count 3 >>" + bytes(100_000), 3),
        (b"/Count 3 /Type /Pages >>", 3),
    ],
    ids=["tree-at-the-beginning", "node-without-beginning"],
)
def test_the_pages_are_those_of_the_page_tree_wherever_it_stands(raw: bytes, pages: int) -> None:
    assert tokens(pdf(0, raw=raw)) == pages * PAGE_TOKENS


def test_a_pdf_that_does_not_tell_its_pages_counts_by_its_size() -> None:
    assert tokens(pdf(0, filling=350_000)) == 4 * PAGE_TOKENS
    assert tokens(pdf(999_999)) == MOST_PAGES * PAGE_TOKENS


def test_a_document_of_text_is_text() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "text " * 1000}}
    packed = {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "dGV4dA==" * 1000}}

    unnamed = {"type": "document", "source": {"type": "text", "data": "text"}}

    assert (
        count(body(plain, packed, unnamed, {"type": "search_result", "source": "https://x.test", "content": []}))
        == NO_MEDIA
    )


def test_media_are_found_wherever_the_provider_accepts_them() -> None:
    one = picture(png(280, 280))
    of_tool = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, one]}
    fetched = {"type": "web_fetch_tool_result", "content": {"type": "web_fetch_result", "content": one}}
    in_document = {"type": "document", "source": {"type": "content", "content": [one]}}
    argument = {"type": "tool_use", "id": "t", "name": "draw", "input": {"content": [one]}}

    assert tokens(one, of_tool, fetched, in_document, argument) == 400
    assert count({**body(), "system": [one]}).tokens(NEW) == 100


def test_a_body_of_text_has_none() -> None:
    for content in ("What is this?", [{"type": "text", "text": "What is this?"}]):
        assert count({"messages": [{"role": "user", "content": content}], "system": "You see."}) is NO_MEDIA


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
HEADS = st.sampled_from([png(9, 9), jpeg(9, 9), gif(9, 9), lossy(9, 9), b"%PDF /Type/Pages /Count 9 /ObjStm stream\n"])
DATA = st.one_of(
    JSON,
    st.builds(lambda head, cut, rest: b64encode(head[:cut] + rest).decode(), HEADS, st.integers(0, 99), st.binary()),
)
TYPES = st.sampled_from(["base64", "url", "file", "text", "content"]) | JSON
MEDIA_TYPES = st.sampled_from(["application/pdf", "image/png", "text/plain"]) | JSON
SOURCES = st.fixed_dictionaries({}, optional={"type": TYPES, "media_type": MEDIA_TYPES, "data": DATA, "content": JSON})
BLOCKS = st.recursive(
    JSON | st.fixed_dictionaries({"type": st.sampled_from(["image", "document"]) | JSON, "source": SOURCES}),
    lambda inner: st.fixed_dictionaries({"content": inner | st.lists(inner)}),
    max_leaves=4,
)
BODIES = JSON | st.fixed_dictionaries(
    {"messages": JSON | st.lists(JSON | st.fixed_dictionaries({"role": JSON, "content": BLOCKS | st.lists(BLOCKS)}))},
    optional={"system": BLOCKS | st.lists(BLOCKS)},
)


@pytest.mark.slow
@given(BODIES)
def test_no_body_makes_the_count_raise(found: object) -> None:
    counted = count(found)

    assert counted.bytes >= 0
    assert 0 <= counted.standard_tokens <= counted.high_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks",
    [
        [picture(b"\xff\xd8" + b"\xff" * 20)] * 15_000,
        [pdf(1)] * 8_000,
        [pdf(0, raw=b"/ObjStm" * 140_000)],
        [pdf(0, raw=b"<</Type/Pages /Count        " * 37_000)],
        [pdf(0, raw=(b"/ObjStm stream\n" + zlib.compress(b"/Type/Pages" * 100_000)) * 200)],
        [pdf(0, raw=random.Random(1).randbytes(20_000_000))],
        [pdf(0, filling=media.PDF_BYTES // 2)] * 6,
    ],
    ids=["images", "documents", "packed", "pages", "bombs", "large", "together"],
)
def test_of_hostile_media_a_bounded_part_is_read(blocks: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def decoded(text: str) -> bytes:
        pieces.append(len(text))
        return a2b_base64(text)

    monkeypatch.setattr(media, "a2b_base64", decoded)
    found = count(body(*blocks))

    assert found.bytes > 100_000
    assert len(pieces) <= 2 * STEPS
    assert sum(pieces) <= 2 * media.PDF_BYTES


@pytest.mark.slow
def test_of_packed_objects_a_bounded_part_is_unpacked() -> None:
    bomb = zlib.compress(bytes(50_000_000))
    counting = media._Counting()

    assert len(counting._unpacked((b"/ObjStm stream\n" + bomb) * 20)) == media.UNPACKED_BYTES


def test_the_simulated_provider_counts_by_the_same_rules() -> None:
    text = b'{"model":"claude-sonnet-5-5","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'

    asked = json.loads(text)
    asked["messages"][0]["content"] = [picture(png(1000, 700, size=60_000)), {"type": "text", "text": "hi"}]

    assert read_request(text).input_tokens == 22
    assert read_request(json.dumps(asked).encode()).input_tokens == pytest.approx(900 + 70, abs=20)
    with pytest.raises(Refusal):
        read_request(b'{"model":5,"max_tokens":5,"messages":[{"role":"user","content":"hi"}]}')
