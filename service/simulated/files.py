"""The simulated Files API: upload, list, retrieve, download, delete; in memory. As at the API, a file that was uploaded
cannot be downloaded, but one that a tool made (`make`). A message that names an unknown file is answered 404."""

import json
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from aiohttp import BodyPartReader, web

from service.simulated.faults import Refusal, invalid
from service.simulated.sending import json_answer, time_text
from topology.codec.file_ids import MAY_NAME, named_in

FILES_PATH: Final = "/v1/files"
MOST_BYTES: Final = 500 * 1024 * 1024
_FILES_KEPT: Final = 10_000
_MADE_BYTES: Final = 1024 * 1024
"""Of a file that a tool makes. Of one that is uploaded, nothing is kept but its size."""
_FORM_FIELD_BYTES: Final = 100
_LIFETIMES_S: Final = (3600, 90 * 86_400)
_PLACE: Final = re.compile(r"/v1/files(?:/([^/]+)(/content)?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFile:
    """What is kept of a file."""

    id: str
    name: str
    media_type: str
    size: int
    created_s: float
    expires_s: float | None = None
    content: bytes | None = None
    """None: it cannot be downloaded."""

    def described(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "file",
            "filename": self.name,
            "mime_type": self.media_type,
            "size_bytes": self.size,
            "created_at": time_text(self.created_s),
            "downloadable": self.content is not None,
            "expires_at": time_text(self.expires_s),
        }


class Files:
    """The files of a simulated API, of which the oldest are dropped if there are too many."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, SimulatedFile] = OrderedDict()

    @property
    def ids(self) -> list[str]:
        return list(self._files)

    def make(self, name: str, content: bytes, *, media_type: str = "text/plain") -> SimulatedFile:
        """As a tool of the provider makes one."""
        content = content[:_MADE_BYTES]
        return self._add(name=name, media_type=media_type, size=len(content), content=content)

    def check(self, body: bytes) -> None:
        """Raises `Refusal` (404) if a request names a file that is not there."""
        if not MAY_NAME.search(body):
            return
        for id in named_in(json.loads(body)):
            self._file(id)

    async def answer(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        place = _PLACE.fullmatch(request.path)
        match request.method, place and (place[1], place[2]):
            case "POST", (None, None):
                return json_answer((await self._upload(request)).described(), headers)
            case "GET", (None, None):
                return json_answer(self._page(request), headers)
            case "GET", (str(id), None):
                return json_answer(self._file(id).described(), headers)
            case "DELETE", (str(id), None):
                del self._files[self._file(id).id]
                return json_answer({"id": id, "type": "file_deleted"}, headers)
            case "GET", (str(id), _):
                file = self._file(id)
                if file.content is None:
                    details = {"error_code": "file_not_downloadable"}
                    raise Refusal(400, f"File {id} is not downloadable", outcome="invalid", details=details)
                shown = f'attachment; filename="{file.name}"'
                more = {"content-type": file.media_type, "content-disposition": shown}
                return web.Response(body=file.content, headers={**headers, **more})
        raise Refusal(404, "Not found", outcome="not_found")

    async def _upload(self, request: web.BaseRequest) -> SimulatedFile:
        if not request.content_type.startswith("multipart/form-data"):
            raise invalid("file: Field required, as multipart/form-data")
        name, media_type, size, lifetime_s = "", "", -1, None
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise invalid("the form has parts of parts")
            if part.name == "file":
                name, media_type = PurePosixPath(part.filename or "").name, part.headers.get("content-type", "")
                size = await _size(part)
            elif part.name == "expires_in_seconds":
                text = (await part.read_chunk(_FORM_FIELD_BYTES)).decode(errors="replace")
                least_s, most_s = _LIFETIMES_S
                if not text.isdigit() or not least_s <= int(text) <= most_s:
                    raise invalid(f"expires_in_seconds: Input should be from {least_s} to {most_s}")
                lifetime_s = int(text)
        if size < 0:
            raise invalid("file: Field required")
        media_type = media_type or "application/octet-stream"
        return self._add(name=name or "unnamed", media_type=media_type, size=size, lifetime_s=lifetime_s)

    def _add(self, *, lifetime_s: int | None = None, **fields: Any) -> SimulatedFile:
        now_s = time.time()
        expires_s = None if lifetime_s is None else now_s + lifetime_s
        file = SimulatedFile(id=f"file_{secrets.token_hex(12)}", created_s=now_s, expires_s=expires_s, **fields)
        self._files[file.id] = file
        if len(self._files) > _FILES_KEPT:
            self._files.popitem(last=False)
        return file

    def _file(self, id: str) -> SimulatedFile:
        if (found := self._files.get(id)) is None:
            raise Refusal(404, f"File not found: {id[:100]}", outcome="not_found")
        return found

    def _page(self, request: web.BaseRequest) -> dict[str, Any]:
        query = request.query
        files = list(reversed(self._files.values()))
        if wanted := query.getall("ids[]", []):
            return {"data": [file.described() for file in files if file.id in wanted], "next_page": None}
        limit, ids = int(query.get("limit", "20")), [file.id for file in files]
        after = query.get("page", "").removeprefix("page_")
        begin = ids.index(after) + 1 if after in ids else 0
        page, has_more = files[begin : begin + limit], len(files) > begin + limit
        return {
            "data": [file.described() for file in page],
            "next_page": f"page_{page[-1].id}" if has_more else None,
        }


async def _size(part: BodyPartReader) -> int:
    size = 0
    while piece := await part.read_chunk(128 * 1024):
        size += len(piece)
        if size > MOST_BYTES:
            raise Refusal(413, "Request exceeds the maximum size", outcome="too_large")
    return size
