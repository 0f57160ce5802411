"""Requests that are right but for their body: odd values, broken JSON, other encodings."""

from __future__ import annotations

import json

from benchmarks.fuzz.http import Dice, Hostile, Make, Route, json_of, plain
from benchmarks.fuzz.values import NASTY, TEXTS, mutated


def _values(kind: str, dice: Dice, route: Route) -> Hostile:
    body = mutated(route.body or {}, dice)
    text = json.dumps(body, ensure_ascii=dice.random() < 0.5)
    return Hostile(kind, plain(route, dice, text.encode("utf-8", "surrogatepass")), route.path)


def _flipped(kind: str, dice: Dice, route: Route) -> Hostile:
    body = bytearray(json_of(route))
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        at = dice.randrange(len(body))
        match dice.randrange(4):
            case 0:
                body[at] ^= 1 << dice.randrange(8)
            case 1:
                body[at:at] = bytes([dice.randrange(256)])
            case 2 if len(body) > 1:
                del body[at : at + dice.randrange(1, 5)]
            case _:
                body += body[at : at + 30]
        body = body or bytearray(b"x")
    return Hostile(kind, plain(route, dice, bytes(body)), route.path)


ENCODINGS = (
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-32-le"),
    lambda text: b"\xef\xbb\xbf" + text.encode(),
    lambda text: text.encode().replace(b'"x', b'"\xc4\xe3'),
    lambda text: text.encode().replace(b'"x', b'"\xed\xa0\x80'),
    lambda text: text.encode().replace(b'"x', b'"\\ud800'),
    lambda text: text.encode().replace(b'"x', b'"\\u0000'),
    lambda text: text.encode().replace(b'"x', b'"\x00'),
    lambda text: text.encode().replace(b'"x', b'"\xf8\x88\x80\x80\x80'),
    lambda text: text.encode().replace(b'"x', b'"\xc0\xaf'),
    lambda text: text.encode() + b"\x00" * 40,
    lambda text: b"\xff\xfe\xfd" * 20,
)


def _encoded(kind: str, dice: Dice, route: Route) -> Hostile:
    body = dice.choice(ENCODINGS)(json_of(route).decode())
    return Hostile(kind, plain(route, dice, body), route.path)


def _deep(kind: str, dice: Dice, route: Route) -> Hostile:
    depth = dice.choice((30, 100, 500, 1000, 5000, 100_000))
    opening, closing = dice.choice((("[", "]"), ('{"a":', "}"), ('[{"x":', "}]")))
    value = opening * depth + "1" + closing * (depth if dice.random() < 0.8 else depth // 2)
    text = _put(route, dice, value)
    return Hostile(kind, plain(route, dice, text), route.path)


def _put(route: Route, dice: Dice, value: str) -> bytes:
    """The route's body with a raw value in one of its fields, or nothing but the value."""
    fields = {key: json.dumps(item) for key, item in (route.body or {"prompt": "x"}).items()}
    if dice.random() < 0.1:
        return value.encode()
    fields[dice.choice([*fields, "metadata", "anything"])] = value
    return ("{" + ",".join(f'"{key}":{item}' for key, item in fields.items()) + "}").encode()


NUMBERS = (
    "1" + "0" * 400, "-1" + "0" * 5000, "1e999", "-1e999", "1e-999", "NaN", "Infinity",
    "-Infinity", "0x10", "01", "+1", "1.", ".5", "-0", "-0.0", "1e", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "18446744073709551616", "0." + "3" * 5000,
    "1_000", "1e400", "4e-324",
)  # fmt: skip
NUMERIC = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "logprobs", "top_logprobs",
    "priority", "max_completion_tokens", "max_output_tokens", "best_of", "prompt", "tokens",
    "stop_token_ids",
)  # fmt: skip


def _numbers(kind: str, dice: Dice, route: Route) -> Hostile:
    fields = {key: json.dumps(item) for key, item in (route.body or {"prompt": "x"}).items()}
    number = dice.choice(NUMBERS)
    value = dice.choice((number, f"[{number}]", f'{{"1":{number}}}', f'{{"{number}":1}}'))
    fields[dice.choice([*NUMERIC, "logit_bias"])] = value
    text = "{" + ",".join(f'"{key}":{item}' for key, item in fields.items()) + "}"
    return Hostile(kind, plain(route, dice, text.encode()), route.path)


def _twice(kind: str, dice: Dice, route: Route) -> Hostile:
    body = json_of(route)
    key = dice.choice(list(route.body or {"prompt": 0}))
    more = json.dumps({key: dice.choice(NASTY)}, allow_nan=False).encode()
    joined = more[:-1] + b"," + body[1:] if dice.random() < 0.5 else body[:-1] + b"," + more[1:]
    return Hostile(kind, plain(route, dice, joined), route.path)


TYPES = (
    b"text/html", b"multipart/form-data", b"multipart/form-data; boundary=x",
    b"application/x-www-form-urlencoded", b"application/json; charset=utf-16",
    b"application/json;;;=", b"", b"application/", b"/", b"\xff\xfe",
    b"application/json, text/plain", b"APPLICATION/JSON", b"a" * 5000, b"image/png",
    b"application/problem+json",
)  # fmt: skip


def _types(kind: str, dice: Dice, route: Route) -> Hostile:
    extra = b"Content-Type: " + dice.choice(TYPES)
    return Hostile(kind, plain(route, dice, json_of(route), extra), route.path)


def _texts(kind: str, dice: Dice, route: Route) -> Hostile:
    """Right in form; only the text is odd."""
    text = dice.choice(TEXTS) * dice.choice((1, 1, 3))
    body = json.loads(json.dumps(route.body or {"prompt": "x"}).replace('"x"', json.dumps(text)))
    return Hostile(kind, plain(route, dice, json.dumps(body).encode()), route.path)


FORMS = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n',
    b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n',
    b'--x\r\nContent-Disposition: form-data; name="\xff"; filename="../../x\x00"\r\n\r\n\xff\r\n',
    b"--x\r\n\r\nno name\r\n",
    b"--x\r\nContent-Disposition: attachment\r\nX: " + b"y" * 20_000 + b"\r\n\r\nx\r\n",
    b"--x",
    b"--",
    b"\r\n\x00\xff",
    b"--x--\r\n",
)  # fmt: skip


def _forms(kind: str, dice: Dice, route: Route) -> Hostile:
    """Pieces of a form, in any order, for whatever takes one; ended or not."""
    body = b"".join(dice.choices(FORMS, k=dice.randrange(1, 6)))
    body += dice.choice((b"--x--\r\n", b"--x--\r\n", b""))
    extra = b"Content-Type: multipart/form-data; boundary=" + dice.choice((b"x", b"x", b'"x"', b""))
    return Hostile(kind, plain(route, dice, body, extra), route.path)


BODIES: dict[str, Make] = {
    "values": _values,
    "values again": _values,
    "flipped bytes": _flipped,
    "encodings": _encoded,
    "deep nesting": _deep,
    "numbers": _numbers,
    "keys twice": _twice,
    "content types": _types,
    "texts": _texts,
    "forms": _forms,
}
