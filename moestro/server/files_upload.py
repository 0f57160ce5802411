"""One upload, from the request's body to a file on disk. Owns: the multipart form, and the limits
while it is read. Nothing is kept in memory but the small fields and one buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from moestro.errors import BodyTooLarge, InvalidRequest
from moestro.server.files_disk import create, sync
from moestro.server.files_store import FileStore

MAX_FIELD = 4096  # bytes of one small field
MAX_PARTS = 32
BUFFER = 1 << 20  # bytes collected before they are written
MAX_NAME = 255  # characters of a file's name
MEDIA = b"multipart/form-data"


@dataclass(slots=True)
class Upload:
    """A form that has come in: the file's bytes are durable at the path of `id`."""

    id: str
    filename: str = ""
    size: int = 0  # bytes
    given: bool = False  # the form had a file
    fields: dict[str, str] = field(default_factory=dict)


class _Form:
    """Takes the parser's calls."""

    def __init__(self, upload: Upload, store: FileStore) -> None:
        self.upload = upload
        self._store = store
        self.waiting = bytearray()  # of the file, not written yet
        self._name = ""
        self._is_file = False
        self._parts = 0
        self._value = bytearray()
        self._header = bytearray()
        self._content = bytearray()
        self._disposition = b""
        self.ended = False

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.")
        self._disposition = b""
        self._value.clear()

    def on_header_begin(self) -> None:
        self._header.clear()
        self._content.clear()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def on_header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._content)

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options and self._name == "file"
        if self._is_file:
            if self.upload.given:
                raise InvalidRequest("The form has more than one file.", param="file")
            self.upload.given = True
            self.upload.filename = shown_name(options[b"filename"])

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._count(end - start)
            self.waiting += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD:
            raise InvalidRequest(f"A field of the form is over {MAX_FIELD} bytes.")

    def on_part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = self._value.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True

    def _count(self, size: int) -> None:
        most = self._store.max_file
        if self.upload.size + size > most:
            raise BodyTooLarge(
                f"The file is over the limit of {most} bytes (--max-file-size).", param="file"
            )
        self._store.grow(size)
        self.upload.size += size


def shown_name(raw: bytes) -> str:
    """The last part of a file's name, printable: it is only ever shown."""
    name = PurePosixPath(raw.decode("utf-8", "replace").replace("\\", "/")).name
    return "".join(c for c in name if c.isprintable())[:MAX_NAME] or "upload"


def boundary_of(content_type: str | None) -> bytes:
    """The form's boundary. Raises InvalidRequest when the body is no form."""
    media, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if media.lower() != MEDIA or not 1 <= len(boundary) <= 256:
        raise InvalidRequest("The content-type header must be multipart/form-data.")
    return boundary


async def receive(body: AsyncIterator[bytes], content_type: str | None, store: FileStore) -> Upload:
    """Read a form with a file. The caller adds the file to the store, or gives it up.

    Raises InvalidRequest and BodyTooLarge, with nothing left on disk.
    """
    boundary = boundary_of(content_type)
    upload = Upload(store.new_id())
    form = _Form(upload, store)
    calls = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    parser = MultipartParser(boundary, calls)  # type: ignore[arg-type]  # a TypedDict of these
    path = store.path(upload.id)
    file = create(path)
    try:
        with file:
            async for chunk in body:
                parser.write(chunk)
                if len(form.waiting) >= BUFFER:
                    await asyncio.to_thread(file.write, bytes(form.waiting))
                    form.waiting.clear()
            if not form.ended:
                raise InvalidRequest("The form is not complete.")
            file.write(form.waiting)
            await asyncio.to_thread(sync, file)
    except BaseException as error:
        give_up(upload, store)
        if isinstance(error, MultipartParseError):
            raise InvalidRequest("The request body is not a valid form.") from None
        raise
    if not upload.given:
        give_up(upload, store)
        raise InvalidRequest("'file' is required.", param="file")
    return upload


def give_up(upload: Upload, store: FileStore) -> None:
    """Remove what an upload has left on disk."""
    store.path(upload.id).unlink(missing_ok=True)
    store.shrink(upload.size)
    upload.size = 0
