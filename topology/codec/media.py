"""Counts the tokens of the images and documents in a request's body by the providers' documented rules, from their
headers alone: an image by its size in pixels, a PDF by its pages. Malformed media count as the most that they could
be."""

import re
import struct
import zlib
from binascii import a2b_base64
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from math import ceil
from typing import Any, Final, NamedTuple

PATCH: Final = 28
"""An image uses one token for each square of this many pixels a side (about one for each 750 pixels)."""
MOST_PAGES: Final = 600
PAGE_TOKENS: Final = 1500 + 1568
"""The tokens of a page of a PDF: its text (documented: 1,500 to 3,000; the pages that were measured have fewer), and
its picture, which has the most pixels of the standard resolution."""
REFERENCED_PAGES: Final = 10
"""How many pages a document is assumed to have that is given by its URL or file id. If the most that the provider
accepts were reserved, one such document would stop every lane for minutes."""
PAGE_BYTES: Final = 100_000
"""A PDF whose number of pages was not found is assumed to have a page for each of this many bytes."""
STEPS: Final = 4000
"""Of one body, this many headers of images and segments of JPEG files are read; all further images count as the
largest. Each takes a microsecond."""
PDF_BYTES: Final = 1024 * 1024
"""Of the PDFs of one body, this many bytes are searched, half of them at a PDF's end."""
UNPACKED_BYTES: Final = 512 * 1024
PDF_STEPS: Final = 20
_NODES: Final = 64
_NODE_BYTES: Final = 16 * 1024
_PACKED: Final = re.compile(b"/ObjStm")
_PACKED_BYTES: Final = 64 * 1024
_VERSION: Final = re.compile(r"claude-(?:[a-z]+-)?(\d{1,3})(?:-(\d{1,2}))?(?!\d)")
_PAGE_TREE: Final = re.compile(rb"/Type\s{0,8}/Pages\b")
_COUNT: Final = re.compile(rb"/Count\s{1,8}(\d{1,6})\b")
_NO_SIZE_IN: Final = b"\xc4\xc8\xcc"


class Resolution(NamedTuple):
    """Anthropic scales an image down to at most this many pixels on its longer side, and to this many tokens."""

    edge: int
    tokens: int


STANDARD: Final = Resolution(1568, 1568)
HIGH: Final = Resolution(2576, 4784)


class Media(NamedTuple):
    """The images and documents in a body: the bytes of the body that they take, which are not text for the model, and
    the tokens that they have at the two resolutions of models."""

    bytes: int = 0
    standard_tokens: int = 0
    high_tokens: int = 0

    def tokens(self, model: str) -> int:
        return self.high_tokens if self.high_tokens and resolution(model) is HIGH else self.standard_tokens


NO_MEDIA: Final = Media()


@lru_cache(maxsize=256)
def resolution(model: str) -> Resolution:
    """The higher one for a model whose name has no version."""
    found = _VERSION.search(model)
    return STANDARD if found and tuple(int(part) for part in found.groups() if part) < (4, 7) else HIGH


def count(body: Any) -> Media:
    """Count the images and documents in the parsed JSON of a body, wherever the provider accepts them. Never raises."""
    if type(body) is not dict or type(turns := body.get("messages")) is not list:
        return NO_MEDIA
    blocks: list[dict[str, Any]] = [
        block
        for turn in turns
        if type(turn) is dict and type(content := turn.get("content")) is list
        for block in content
        if type(block) is dict and ("source" in block or "content" in block)
    ]
    if type(system := body.get("system")) is list:
        blocks += _dicts(system)
    if not blocks:  # the usual case; until here, each turn and block of text costs less than 0.1 µs
        return NO_MEDIA
    counting = _Counting()
    while blocks:
        block = blocks.pop()
        if isinstance(source := block.get("source"), dict):
            counting.add(block.get("type"), source)
            blocks += _dicts(source.get("content"))
        else:  # the result of a tool
            blocks += _dicts(block.get("content"))
    return counting.found


TILE: Final = 512
TILE_TOKENS: Final = 170
LOW_DETAIL_TOKENS: Final = 85
"""OpenAI scales an image to at most 2048 pixels on its longer side and 768 on its shorter one; it has so many tokens,
and more for each tile of so many pixels a side. Of low detail it has only the former (its guide "Images and vision").
Newer models count otherwise, and fewer."""
AUDIO_BYTES_PER_TOKEN: Final = 1600
"""OpenAI has ten tokens for a second of a user's speech, of which MP3 has some 16 KB."""


def count_parts(parts: Sequence[Any]) -> Media:
    """The same for the parts of a message in OpenAI's dialects: images, audio and files, in the body or by URL."""
    counting: _Counting | None = None
    for part in parts:
        kind = part.get("type") if type(part) is dict else None
        if type(kind) is not str or kind not in _OPENAI_MEDIA:
            continue
        counting = counting or _Counting()
        given = part.get(kind)
        fields = {**part, **given} if isinstance(given, dict) else part
        url = fields.get("url") or fields.get("image_url")
        if kind in ("image_url", "input_image"):
            counting.add_openai_image(url if isinstance(url, str) else "", is_low=fields.get("detail") == "low")
        else:
            data = fields.get("data") or fields.get("file_data")
            counting.add_openai_file(data if isinstance(data, str) else "", is_audio=kind == "input_audio")
    return NO_MEDIA if counting is None else counting.found


_OPENAI_MEDIA: Final = frozenset({"image_url", "input_image", "input_audio", "file", "input_file"})
_DATA_URL: Final = re.compile(r"data:[^,]{0,200};base64,")


def _dicts(content: Any) -> list[dict[str, Any]]:
    content = [content] if isinstance(content, dict) else content
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


class _Counting:
    """What is read of the media of one body is limited for all of them together."""

    def __init__(self) -> None:
        self.found = NO_MEDIA
        self._steps = STEPS
        self._pdf_bytes = PDF_BYTES
        self._unpacked_bytes = UNPACKED_BYTES

    def add(self, kind: object, source: dict[str, Any]) -> None:
        data, media_type = source.get("data"), source.get("media_type")
        if source.get("type") in ("url", "file"):
            if kind == "document":
                self._add(0, REFERENCED_PAGES * PAGE_TOKENS, REFERENCED_PAGES * PAGE_TOKENS)
            elif kind == "image":
                self._add(0, STANDARD.tokens, HIGH.tokens)
        elif source.get("type") == "base64" and isinstance(data, str):
            if media_type == "application/pdf":
                tokens = self._pages(data) * PAGE_TOKENS
                self._add(len(data), tokens, tokens)
            elif not (isinstance(media_type, str) and media_type.startswith("text/")):
                size = self._size(data)
                self._add(len(data), _image_tokens(size, STANDARD), _image_tokens(size, HIGH))

    def add_openai_image(self, url: str, *, is_low: bool) -> None:
        head = _DATA_URL.match(url)
        size = self._size(url[head.end() :]) if head is not None and not is_low else None
        tokens = LOW_DETAIL_TOKENS if is_low else LOW_DETAIL_TOKENS + TILE_TOKENS * _tiles(size)
        self._add(len(url) if head is not None else 0, tokens, tokens)

    def add_openai_file(self, data: str, *, is_audio: bool) -> None:
        head = _DATA_URL.match(data)
        encoded = data if head is None else data[head.end() :]
        if is_audio:
            tokens = len(encoded) * 3 // 4 // AUDIO_BYTES_PER_TOKEN
        else:
            tokens = PAGE_TOKENS * (self._pages(encoded) if data else REFERENCED_PAGES)
        self._add(len(data), tokens, tokens)

    def _add(self, size: int, standard: int, high: int) -> None:
        before = self.found
        self.found = Media(before.bytes + size, before.standard_tokens + standard, before.high_tokens + high)

    def _size(self, data: str) -> tuple[int, int] | None:
        if self._steps <= 0:
            return None
        self._steps -= 1
        head = _bytes_of(data, 0, 30).ljust(30, b"\0")
        found: tuple[int, int] | None = None
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            found = struct.unpack(">II", head[16:24])
        elif head.startswith((b"GIF87a", b"GIF89a")):
            found = struct.unpack("<HH", head[6:10])
        elif head.startswith(b"RIFF"):
            found = _webp_size(head)
        elif head.startswith(b"\xff\xd8"):
            found = self._jpeg_size(data)
        return found if found and all(found) else None

    def _jpeg_size(self, data: str) -> tuple[int, int] | None:
        at = 2
        while self._steps > 0:
            self._steps -= 1
            head = _bytes_of(data, at, 9)
            if len(head) < 9 or head[0] != 0xFF:
                return None
            if 0xC0 <= head[1] <= 0xCF and head[1] not in _NO_SIZE_IN:
                height, width = struct.unpack(">HH", head[5:])
                return width, height
            # a marker may follow fill bytes; else two bytes that say how long the segment is follow it
            at += 1 if head[1] == 0xFF else 2 + int.from_bytes(head[2:4], "big")
        return None

    def _pages(self, data: str) -> int:
        size, found = len(data) // 4 * 3, 0
        if self._steps > 0:
            read = min(size, self._pdf_bytes)
            self._steps -= PDF_STEPS
            self._pdf_bytes -= read
            if read == size:
                parts = [_bytes_of(data, 0, size)]
            else:
                half = read // 2
                parts = [_bytes_of(data, 0, half), _bytes_of(data, size - half, half)]
            found = max(max(_counted_pages(part), _counted_pages(self._unpacked(part))) for part in parts)
        return min(MOST_PAGES, found or 1 + size // PAGE_BYTES)

    def _unpacked(self, raw: bytes) -> bytes:
        found: list[bytes] = []
        for node in islice(_PACKED.finditer(raw), _NODES):
            if self._unpacked_bytes <= 0:
                break
            begin = raw.find(b"stream", node.end(), node.end() + _NODE_BYTES)
            packed = raw[begin + 6 : begin + _PACKED_BYTES].lstrip(b"\r\n") if begin >= 0 else b""
            try:
                found.append(zlib.decompressobj().decompress(packed, self._unpacked_bytes))
            except zlib.error:
                found.append(b"")
            self._unpacked_bytes -= len(found[-1])
        return b"\n".join(found)


def _bytes_of(data: str, at: int, size: int) -> bytes:
    first, end = at // 3, -(-(at + size) // 3)
    try:
        return a2b_base64(data[4 * first : 4 * end])[at - 3 * first :][:size]
    except ValueError:
        return b""


def _webp_size(head: bytes) -> tuple[int, int] | None:
    match head[12:16]:
        case b"VP8 ":
            width, height = struct.unpack("<HH", head[26:30])
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            packed = int.from_bytes(head[21:25], "little")
            return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
        case b"VP8X":
            return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    return None


def _image_tokens(size: tuple[int, int] | None, limit: Resolution) -> int:
    if size is None:
        return limit.tokens
    scale = min(1.0, limit.edge / max(size))
    across, down = (max(1, ceil(round(side * scale) / PATCH)) for side in size)
    return min(limit.tokens, across * down)


def _tiles(size: tuple[int, int] | None) -> int:
    """Those of the largest image, if the size is unknown."""
    longer, shorter = (2048.0, 768.0) if size is None else (float(max(size)), float(min(size)))
    scale = min(1.0, 2048 / longer, 768 / shorter)
    return ceil(longer * scale / TILE) * ceil(shorter * scale / TILE)


def _counted_pages(raw: bytes) -> int:
    most = 0
    for node in islice(_PAGE_TREE.finditer(raw), _NODES):
        begin = max(raw.rfind(b"<<", max(0, node.start() - _NODE_BYTES), node.start()), 0)
        end = raw.find(b">>", node.end(), node.end() + _NODE_BYTES)
        found = _COUNT.search(raw, begin, end if end >= 0 else node.end() + _NODE_BYTES)
        most = max(most, int(found[1]) if found else 0)
    return most
