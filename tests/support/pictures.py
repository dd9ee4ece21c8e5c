"""Images and documents as content blocks: the headers are genuine, the rest is filling."""

import struct
import zlib
from base64 import b64encode


def png(width: int, height: int, *, size: int = 64) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\x02\0\0\0" + bytes(size)


def jpeg(width: int, height: int, *, frame: int = 0xC0, exif: int = 100) -> bytes:
    """An image whose size comes after so many bytes of other segments."""
    whole, rest = divmod(exif, 60_000)
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", size + 2) + bytes(size) for size in [*[60_000] * whole, rest])
    return b"\xff\xd8" + segments + b"\xff" + struct.pack(">BHBHHB", frame, 17, 8, height, width, 3) + bytes(90)


def picture(raw: bytes) -> dict[str, object]:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(raw).decode()}
    return {"type": "image", "source": source}


def pdf(pages: int, *, packed: bool = False, filling: int = 0, raw: bytes | None = None) -> dict[str, object]:
    """A document of so many pages, whose tree of pages is at its end; without one, if `pages` is 0."""
    if raw is None:
        kids = b" ".join(b"%d 0 R" % number for number in range(min(pages, 600)))
        outline, part = b"<< /Type /Outlines /Count 900 >>", b"<< /Type /Pages /Parent 1 0 R /Count 1 >>"
        tree = b"%s << /Type /Pages /Kids [%s] /Count %d >>\n%s %s" % (outline, kids, pages, outline, part)
        tree = tree if pages else b""
        if packed:
            tree = b"<< /Type /ObjStm /N 2 /Filter /FlateDecode >>\nstream\r\n" + zlib.compress(tree) + b"\nendstream"
        raw = b"%PDF-1.7\n" + bytes(filling) + tree + b"\ntrailer"
    source = {"type": "base64", "media_type": "application/pdf", "data": b64encode(raw).decode()}
    return {"type": "document", "source": source}
