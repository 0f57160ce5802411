"""One connection of a client, as uvicorn reads it, with two things put right.

Owns: that an offer of another protocol is read past, and that a request hears that its client is
gone, also while another waits behind it on the same connection. Does not own: limits
(`http_protocol`).
"""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

OFFERS = frozenset({b"upgrade", b"http2-settings"})  # headers, and words of `connection`


class Connection(HttpToolsProtocol):
    """uvicorn's protocol.

    A request may offer to go on in another protocol, as Java's client does with every one. The
    parser takes what follows such a head for that protocol, so that the body would be lost: the
    head is read again without the offer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served: RequestResponseCycle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone; `cycle` may be a request that waits behind the one served."""
        self.tell_gone()
        super().connection_lost(exc)

    def tell_gone(self) -> None:
        """Let the request that is served know that nobody reads its reply any more."""
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._read_past(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """The head is there; one with an offer is not served yet."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is there; one with an offer is not."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _read_past(self, rest: bytes) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":  # always an offer, and there is nothing else in it
            self.send_400_response("")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode("ascii"))]
        lines += [b"%b: %b" % pair for pair in map(_without_offer, self.headers) if pair[1]]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)


def _without_offer(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """A header, its value empty when it was only about the offer."""
    name, value = header
    if name in OFFERS:
        return name, b""
    if name == b"connection":
        words = [word.strip() for word in value.split(b",")]
        return name, b", ".join(word for word in words if word.lower() not in OFFERS)
    return header
