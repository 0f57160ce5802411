"""Requests whose HTTP is broken: lengths, chunks, headers, request lines, several at once."""

from __future__ import annotations

from benchmarks.fuzz.http import Dice, Hostile, Make, Route, json_of, plain


def _truncated(kind: str, dice: Dice, route: Route) -> Hostile:
    body = json_of(route)
    data = plain(route, dice, body)
    if dice.random() < 0.5:  # what is there is announced rightly, and is no JSON
        cut = body[: dice.randrange(len(body))]
        return Hostile(kind, plain(route, dice, cut), route.path)
    return Hostile(kind, data[: dice.randrange(1, len(data))], route.path, whole=False)


LENGTHS = (
    b"-1", b"+5", b"1e3", b"0x10", b"", b" ", b"99999999999999999999999", b"9223372036854775808",
    b"1,2", b"5 5", b"abc", b"\x00", "²".encode("latin-1"), b"00000000000000000000005",
    b"4294967296",
)  # fmt: skip


def _lengths(kind: str, dice: Dice, route: Route) -> Hostile:
    body = json_of(route)
    match dice.randrange(3):
        case 0:
            data = plain(route, dice, body, length=dice.choice(LENGTHS) or b" ")
        case 1:
            data = plain(route, dice, body, b"Content-Length: %d" % dice.randrange(len(body) * 2))
        case _:
            data = plain(route, dice, body, b"Transfer-Encoding: chunked")
    return Hostile(kind, data, route.path, whole=False)


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def _chunked(kind: str, dice: Dice, route: Route) -> Hostile:
    body = json_of(route)
    extra = (b"Transfer-Encoding: chunked",)
    right = b"".join(_chunk(body[i : i + 7]) for i in range(0, len(body), 7)) + b"0\r\n\r\n"
    wrong = (
        b"zz\r\n" + body,
        b"-5\r\n" + body + b"\r\n0\r\n\r\n",
        b"ffffffffffffffffff\r\n" + body,
        b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(body), b"x" * dice.choice((3, 20_000)), body),
        b"%x\n%s\n0\n\n" % (len(body), body),
        b"%x\r\n%s0\r\n\r\n" % (len(body), body),
        b"%x\r\n%s\r\n0\r\nTrailer: x\r\nContent-Length: 5\r\n\r\n" % (len(body), body),
        b"0\r\n\r\n",
        _chunk(body)[:-3],
        b"\r\n\r\n",
    )
    if dice.random() < 0.2:
        return Hostile(kind, plain(route, dice, right, *extra, length=None), route.path)
    data = plain(route, dice, dice.choice(wrong), *extra, length=None)
    return Hostile(kind, data, route.path, whole=False)


NAMES = (
    b"X-Request-Id", b"Authorization", b"Accept", b"Expect", b"Cookie", b"Origin", b"Range",
    b"X-Api-Key", b"Accept-Encoding", b"Forwarded", b"Upgrade", b"TE", b"If-Match",
    b"Access-Control-Request-Method", b"OpenAI-Organization", b"anthropic-version",
)  # fmt: skip
VALUES = (
    b"\xff\xfe", b"", b" ", b"a" * 9000, b"Bearer \xff", b"Bearer", b"Basic AAAA", b"100-continue",
    b"x\x00y", b"x\ry", b"\t", b'"', b"bytes=0-", b"h2c", b"websocket", "é".encode(), b"*",
    b"req\x1b[31m", b"%s%n%x", b"{{7*7}}", b"';--",
)  # fmt: skip


def _header_lines(dice: Dice) -> list[bytes]:
    return [dice.choice(NAMES) + b": " + dice.choice(VALUES) for _ in range(dice.randrange(1, 4))]


def _headers(kind: str, dice: Dice, route: Route) -> Hostile:
    lines = _header_lines(dice)
    match dice.randrange(8):
        case 0:
            lines += [b"X-%d: y" % i for i in range(dice.choice((50, 200, 5000)))]
        case 1:
            lines.append(
                dice.choice((b" folded", b"no colon", b": no name", b"sp ace: x", b"\x00: x"))
            )
        case 2:
            lines.append(b"X-Long: " + b"a" * dice.choice((1000, 70_000, 1_000_000)))
        case 3:
            lines += [b"Connection: Upgrade", b"Upgrade: " + dice.choice((b"h2c", b"websocket"))]
    return Hostile(kind, plain(route, dice, json_of(route), *lines), route.path)


METHODS = (
    b"GET", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"post",
    b"FOO", b"M-SEARCH", b"PRI", b"", b"PO ST", b"\xff", b"GET" * 1000,
)  # fmt: skip
PATHS = (
    b"/v1/%ff%fe", b"/%00", b"//", b"/../../etc/passwd", b"/v1/..%2f..%2f", b"*",
    b"http://x/v1/models", b"?x", b"/v1/models/" + b"a" * 10_000, b"/v1/models/a%2fb",
    b"/v1/models/ ", "/v1/models/é".encode(), b"", b"x", b"/metrics?x=\x00",
    b"/v1/chat/completions/", b"/v1/models?" + b"a=b&" * 500, b"/%", b"/%zz", b"http://[::1",
    b"/openapi.json", b"/docs", b"/v1/models/%F0%9F%98%80", b"/v1/completions;x",
    b"/v1/completions#x",
)  # fmt: skip
VERSIONS = (
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.1 x",
    b"",
    b"HTTP/11",
    b"http/1.1",
    b"\x00",
)


def _line(kind: str, dice: Dice, route: Route) -> Hostile:
    path = route.path.replace("{", "").replace("}", "").encode()
    method, version = route.method.encode(), b"HTTP/1.1"
    match dice.randrange(4):
        case 0:
            method = dice.choice(METHODS)
        case 1:
            path = dice.choice(PATHS)
        case 2:
            version = dice.choice(VERSIONS)
        case _:
            method, path = dice.choice(METHODS), dice.choice(PATHS)
    lines = (
        method + b" " + path + b" " + version,
        b"Host: x",
        b"Content-Length: 0",
        b"Connection: close",
    )
    data = b"\r\n".join([*lines, b"", b""])
    return Hostile(kind, data, path.decode("latin-1"), whole=False, head=method == b"HEAD")


STARTS = (
    b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 50,
    b"\r\n" * 50, b"SSH-2.0-x\r\n", b"GET /\n\n", b"{}\r\n\r\n", b"",
)  # fmt: skip


def _garbage(kind: str, dice: Dice, route: Route) -> Hostile:
    start = dice.choice(STARTS) or dice.randbytes(300)
    data = start + dice.randbytes(dice.randrange(100)) + b"\r\n\r\n"
    return Hostile(kind, data, route.path, whole=False)


def _pipelined(kind: str, dice: Dice, route: Route) -> Hostile:
    first = plain(route, dice, json_of(route)).replace(b"Connection: close\r\n", b"")
    second = dice.choice(
        (first, b"garbage\r\n\r\n", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", dice.randbytes(60))
    )
    last = plain(Route("GET", "/version", None), dice, b"")
    return Hostile(kind, first + second + last, route.path, whole=False)


def _address(kind: str, dice: Dice, route: Route) -> Hostile:
    """A known route by any method, its parameters filled with odd text."""
    odd = dice.choice(
        (
            "x",
            "%00",
            "..",
            "%2e%2e%2f",
            "a" * 3000,
            "%F0%9F%98%80",
            "-1",
            "%20",
            "file-1",
            "batch_1",
        )
    )
    path = route.path.split("{")[0] + odd if "{" in route.path else route.path
    path += dice.choice(
        ("", "", "/", "?", "?stream=true", "?limit=-1&after=x", "?limit=abc", "?x[]=%ff")
    )
    method = dice.choice(("GET", "POST", "HEAD", "DELETE", "PUT", "OPTIONS", route.method))
    data = plain(Route(method, path, route.body), dice, json_of(route))
    return Hostile(kind, data, path, head=method == "HEAD")


FRAMINGS: dict[str, Make] = {
    "truncated": _truncated,
    "content-length": _lengths,
    "chunks": _chunked,
    "headers": _headers,
    "request lines": _line,
    "garbage": _garbage,
    "pipelined": _pipelined,
    "addresses": _address,
}
