"""`/v1/files`: Anthropic's Files API. Calls are passed on, in pieces, to the account where a file lies: a new one goes
to the first provider of the caller's lane. Whose a file is, and where it lies, is in the store. The file, and what is
known of it, is at the provider alone, so that a list shows what is still there.

An upload that has reached the provider is noted also if its client has disconnected, so that no file lies there without
an owner; a file that cannot be noted is deleted again. Of the caller's call only the form, the version and the betas
reach the provider, and no path or query is made of anything but the id of a file that is known.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import structlog
from aiohttp import web

from consumers.background import Background
from consumers.clock import moment_ms, now_ms
from consumers.failures import ProviderError
from consumers.providers.anthropic import Lookups, Passed
from consumers.state.base import StoredFile, StoreUnavailable
from consumers.state.store import Store
from lanekeeper.contract import names as n
from lanekeeper.telemetry import signals
from service.config.settings import GatewayKey, Settings
from service.gateway.access import lane_of, only_value
from service.gateway.accounts import Accounts, listed, not_called, passed_headers
from service.gateway.answers import Writing
from service.gateway.calls import LEAST_BYTES_PER_S, limit_of, provider_headers_of, send_100
from service.gateway.problems import TYPES, ApiError
from service.gateway.shares import SharedLimit, Shares

PATH: Final = "/v1/files"
ONE: Final = "/v1/files/{id}"
CONTENT: Final = "/v1/files/{id}/content"
MOST_BYTES: Final = 500 * 1024 * 1024 + 64 * 1024
"""The largest file that the API takes, with the parts of the form around it."""
AT_A_TIME: Final = 32
PIECE_WITHIN_S: Final = 30.0
ANSWER_WITHIN_S: Final = 60.0
"""How long the provider may take for an answer; after an upload, for what is left to be done with the file."""
PAGE: Final = 20
PAGE_AT_MOST: Final = 1000
IDS_AT_MOST: Final = 100
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CURSOR: Final = re.compile(r"page_(\d{1,15})_([A-Za-z0-9_-]{1,128})")
_FORM: Final = "multipart/form-data"
_SAFE: Final = {"content-security-policy": "sandbox", "x-content-type-options": "nosniff"}
"""Somebody else may have written the content, and a browser would show it under the gateway's own address."""
log = structlog.get_logger()
_Call = Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]


class FilePaths:
    """The handlers; they raise ApiError, LanekeeperError."""

    def __init__(self, settings: Settings, accounts: Accounts, store: Store, shares: Shares) -> None:
        self._accounts = accounts
        self._store = store
        self._calls = shares.calls
        self._places = SharedLimit(AT_A_TIME, "calls for files")
        self._lanes = {lane.name: lane for lane in settings.lane_specs()}
        self._limits = settings.files
        self._background = Background()

    def handlers(self) -> Mapping[tuple[str, str], _Call]:
        return {
            ("POST", PATH): self._upload,
            ("GET", PATH): self._list,
            ("GET", ONE): self._retrieve,
            ("DELETE", ONE): self._delete,
            ("GET", CONTENT): self._download,
        }

    async def aclose(self) -> None:
        await self._background.finish(within_s=0)

    async def provider_of(self, ids: Sequence[str], caller: GatewayKey) -> str | None:
        """Where the files that a body names lie; None: not known. Raises ApiError 404 for those of another tenant."""
        known = await self._store.find_files(ids) if ids else {}
        for file in known.values():
            if file.tenant != _tenant(caller):
                raise _no_such_file(file.id)
        return next((file.provider for file in known.values()), None)

    async def _upload(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        lane = lane_of(caller, only_value(request.headers, n.LANE_NAME), self._lanes)
        provider = self._accounts.first_of(lane.name)
        account = self._accounts.of(provider)
        if request.content_type != _FORM or request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, f"header Content-Type: {_FORM} is needed, without a Content-Encoding")
        if (announced := request.content_length or 0) > MOST_BYTES:
            raise _too_large()
        self._accounts.count(caller)
        kept = await self._store.files(_tenant(caller))
        size = sum(file.size for file in kept) + announced
        if len(kept) >= self._limits.per_tenant or size > self._limits.bytes_per_tenant:
            raise _over_quota()
        coming = _Coming(request)
        uploading = self._background.begin(
            self._uploaded(request, caller, coming, account=account, provider=provider), name="upload"
        )
        try:
            return await asyncio.shield(uploading)
        except asyncio.CancelledError:  # the client has disconnected
            if coming.is_whole:
                uploading.add_done_callback(_note_left)
            else:
                uploading.cancel()
            raise

    async def _uploaded(
        self, request: web.Request, caller: GatewayKey, coming: _Coming, *, account: Lookups, provider: str
    ) -> web.StreamResponse:
        headers = {"content-type": request.headers["content-type"]}
        if request.content_length is not None:
            headers["content-length"] = str(request.content_length)
        async with self._taken(caller), self._passed(account, "POST", PATH, request, coming, headers) as passed:
            answer = await passed.body()
        if passed.status != 200:
            return _response(passed, answer)
        file = _file_in(answer, tenant=_tenant(caller), provider=provider)
        is_kept = False
        try:
            is_kept = await self._store.keep_file(file)
            if not is_kept and file.id in await self._store.find_files([file.id]):
                raise ApiError(502, "the provider has answered with the id of another file")
        finally:
            if not is_kept:
                await self._remove(account, file)
        if not is_kept:
            raise _over_quota()
        return _response(passed, answer)

    async def _remove(self, account: Lookups, file: StoredFile) -> None:
        with suppress(StoreUnavailable):
            if file.id in await self._store.find_files([file.id]):
                return  # it is somebody's
        try:
            async with account.passed("DELETE", f"{PATH}/{file.id}", query={}, headers={}) as passed:
                if passed.status == 200:
                    return
                error = f"status {passed.status}"
        except ProviderError as caught:
            error = caught.brief
        log.error(signals.FILE_UNKEPT, file=file.id, error=error)

    async def _list(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        query = request.query
        wanted = [*query.getall("ids[]", ()), *query.getall("ids", ())]
        if wanted and (len(set(wanted)) > IDS_AT_MOST or {"page", "limit", "after_id"} & query.keys()):
            raise ApiError(400, f"ids: at most {IDS_AT_MOST}, and neither with page nor with limit")
        limit = limit_of(query, PAGE, 1, PAGE_AT_MOST)
        files = await self._store.files(_tenant(caller))
        if wanted:
            files, limit = [file for file in files if file.id in wanted], IDS_AT_MOST
        files = _after(files, query)
        page, has_more = files[:limit], len(files) > limit
        found = await self._described(page, request, caller)
        data = [found[file.id] for file in page if file.id in found]
        if (scope := query.get("scope_id")) is not None:
            data = [each for each in data if isinstance(each.get("scope"), dict) and each["scope"].get("id") == scope]
        last = page[-1] if page else None
        content = {
            "data": data,
            "next_page": f"page_{last.created_ms}_{last.id}" if last is not None and has_more else None,
            # as the API's versions before had it
            "has_more": has_more,
            "first_id": page[0].id if page else None,
            "last_id": None if last is None else last.id,
        }
        return web.json_response(content, headers=passed_headers({}))

    async def _described(
        self, files: Sequence[StoredFile], request: web.Request, caller: GatewayKey
    ) -> Mapping[str, dict[str, Any]]:
        """What the providers know of these files, by id: nothing of those that have expired or were deleted there."""
        found: dict[str, dict[str, Any]] = {}
        for provider in dict.fromkeys(file.provider for file in files):
            ids = [file.id for file in files if file.provider == provider]
            for begin in range(0, len(ids), IDS_AT_MOST):
                some = ids[begin : begin + IDS_AT_MOST]
                self._accounts.count(caller)
                account = self._accounts.of(provider)
                query = {"ids[]": some}
                async with self._taken(caller), self._passed(account, "GET", PATH, request, query=query) as passed:
                    body = await passed.body()
                if passed.status != 200:
                    raise ApiError(passed.status, "", headers=passed_headers(passed.headers), whole=body)
                found |= {each["id"]: each for each in listed(body) if each["id"] in some}
        return found

    async def _retrieve(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        file = await self._owned(request, caller)
        account = self._accounts.of(file.provider)
        async with self._taken(caller), self._passed(account, "GET", f"{PATH}/{file.id}", request) as passed:
            return _response(passed, await passed.body())

    async def _delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        file = await self._owned(request, caller)
        return await self._background.sheltered(
            self._deleted(request, caller, file), name="delete file", if_left=_note_left
        )

    async def _deleted(self, request: web.Request, caller: GatewayKey, file: StoredFile) -> web.StreamResponse:
        account = self._accounts.of(file.provider)
        async with self._taken(caller), self._passed(account, "DELETE", f"{PATH}/{file.id}", request) as passed:
            body = await passed.body()
        if passed.status in (200, 404):
            await self._store.forget_file(file)
        return _response(passed, body)

    async def _download(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        file = await self._owned(request, caller)
        account, path = self._accounts.of(file.provider), f"{PATH}/{file.id}/content"
        async with self._taken(caller), self._passed(account, "GET", path, request) as passed:
            if passed.status != 200:
                return _response(passed, await passed.body())
            headers = {**passed_headers(passed.headers), **_SAFE, "content-disposition": "attachment"}
            for name in ("content-type", "content-length", "content-disposition"):
                if name in passed.headers:
                    headers[name] = passed.headers[name]
            if passed.headers.get("content-encoding", "identity") != "identity":  # it is passed on unpacked
                headers.pop("content-length", None)
            if not headers["content-disposition"].startswith("attachment"):
                headers["content-disposition"] = "attachment"
            writing = Writing(request, web.StreamResponse(headers=headers))
            if request.method == "HEAD":
                return writing.response
            try:
                await writing.write_all(passed.pieces())
            except ConnectionError:
                return writing.response
            except ProviderError:
                if not writing.has_begun or request.transport is None:
                    raise
                request.transport.abort()  # otherwise the client would take what it has for the whole file
                return writing.response
            return await writing.end()

    async def _owned(self, request: web.Request, caller: GatewayKey) -> StoredFile:
        id = request.match_info["id"]
        file = (await self._store.find_files([id])).get(id) if _ID.fullmatch(id) else None
        if file is None or file.tenant != _tenant(caller):
            raise _no_such_file(id)
        self._accounts.count(caller)
        return file

    @asynccontextmanager
    async def _taken(self, caller: GatewayKey) -> AsyncIterator[None]:
        with self._calls.taken(caller.tenant), self._places.taken(caller.tenant):
            yield

    @asynccontextmanager
    async def _passed(
        self,
        account: Lookups,
        method: str,
        path: str,
        request: web.Request,
        content: _Coming | None = None,
        content_headers: Mapping[str, str] | None = None,
        *,
        query: Mapping[str, Sequence[str]] | None = None,
    ) -> AsyncIterator[Passed]:
        """Make the call, and yield its response as soon as its head has come. Raises ApiError."""
        asked: dict[str, str | Sequence[str]] = {**(query or {})}
        if request.query.get("beta") == "true":
            asked["beta"] = "true"
        seconds = ANSWER_WITHIN_S + (0 if content is None else content.within_s)
        limit = asyncio.timeout(seconds)
        making = account.passed(
            method,
            path,
            query=asked,
            headers=provider_headers_of(request.headers),
            content=content,
            content_headers=content_headers or {},
        )
        try:
            async with limit, making as passed:
                limit.reschedule(None)
                yield passed
        except ProviderError as error:
            if content is not None and content.error is not None:
                raise content.error from error
            raise not_called(error) from error
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ApiError(504, f"no answer from the provider within {seconds:g} s") from error


class _Coming:
    """The body of a call, in pieces as they come. `error`: why it ended before its end; `is_whole`: it has not."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.within_s = PIECE_WITHIN_S + (request.content_length or MOST_BYTES) / LEAST_BYTES_PER_S
        self.error: ApiError | None = None
        self.is_whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        came, pieces = 0, self._request.content.iter_any()
        send_100(self._request)
        while True:
            try:
                async with asyncio.timeout(PIECE_WITHIN_S):
                    piece = await anext(pieces, b"")
            except TimeoutError:
                text = f"the body stopped coming for {PIECE_WITHIN_S:g} s"
                self.error = ApiError(408, text, "timeout_error")
                raise self.error from None
            except web.RequestPayloadError:
                self.error = ApiError(400, "body: not as its headers content-length and transfer-encoding say")
                raise self.error from None
            if not piece:
                self.is_whole = True
                return
            came += len(piece)
            if came > MOST_BYTES:
                self.error = _too_large()
                raise self.error
            self.is_whole = came == self._request.content_length  # the provider may have it before the end is read
            yield piece


def _tenant(caller: GatewayKey) -> str:
    return caller.tenant or ""


def _note_left(uploading: asyncio.Task[Any]) -> None:
    if not uploading.cancelled() and isinstance(error := uploading.exception(), StoreUnavailable):
        log.error(signals.FILE_UNKEPT, error=str(error))


def _no_such_file(id: str) -> ApiError:
    return ApiError(404, f"File not found: {id[:128]}")


def _too_large() -> ApiError:
    return ApiError(413, f"a file may have 500 MB: larger than {MOST_BYTES} bytes with its form")


def _over_quota() -> ApiError:
    settings = "LANEKEEPER_FILES__PER_TENANT, LANEKEEPER_FILES__BYTES_PER_TENANT"
    message = f"this tenant has as many files, or bytes of files, as it may ({settings}): delete some"
    error = {"type": TYPES[400], "message": message, "details": {"error_code": "storage_quota_exceeded"}}
    return ApiError(400, message, whole=json.dumps({"type": "error", "error": error}).encode())


def _after(files: Sequence[StoredFile], query: Mapping[str, str]) -> Sequence[StoredFile]:
    """Those after the page before. Raises ApiError."""
    if (cursor := query.get("page")) is not None:
        if (found := _CURSOR.fullmatch(cursor)) is None:
            raise ApiError(400, "page: not a cursor that a list has answered as next_page")
        last = int(found[1]), found[2]
        return [file for file in files if (file.created_ms, file.id) < last]
    if (id := query.get("after_id")) is not None:
        ids = [file.id for file in files]
        if id not in ids:
            raise ApiError(400, "after_id: no such file")
        return files[ids.index(id) + 1 :]
    return files


def _file_in(body: bytes, *, tenant: str, provider: str) -> StoredFile:
    """Raises ApiError 502."""
    try:
        found = json.loads(body)
        id, size, expires = found["id"], found.get("size_bytes"), found.get("expires_at")
        if not _ID.fullmatch(id):
            raise ValueError
        until_ms = moment_ms(expires) if isinstance(expires, str) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ApiError(502, "the provider has taken the file, and its answer cannot be read") from None
    return StoredFile(
        id=id,
        tenant=tenant,
        provider=provider,
        created_ms=now_ms(),
        size=size if type(size) is int and size >= 0 else 0,
        until_ms=until_ms,
    )


def _response(passed: Passed, body: bytes) -> web.Response:
    headers = {**passed_headers(passed.headers), "content-type": "application/json"}
    return web.Response(status=passed.status, body=body, headers=headers)
