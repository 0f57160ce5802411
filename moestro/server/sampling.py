"""From a request's numbers to final `SamplingParams`. Owns: ranges, defaults and seeds.

Order of precedence: the request, the checkpoint's generation_config.json, the API's default.
Every refusal names the field, its limit and the value.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moestro.errors import ContextTooLong, InvalidRequest
from moestro.server.schema import GenerationRequest
from moestro.server.settings import GenerationDefaults, ServerSettings
from moestro.types import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this are argmax
COLDEST = 0.01  # a positive temperature is raised to this: below, float32 logits overflow
INT64 = 2**63
MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What token ids may be. `size` counts the rows that the model can emit."""

    size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopRules:
    """Stop strings, which only the server sees."""

    strings: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0


def number(
    name: str, value: float | None, default: float, low: float, high: float, *, over: bool = False
) -> float:
    """Return `value` or `default`; raise when the value is outside low..high (`over`: not low)."""
    if value is None:
        return default
    if value < low or value > high or (over and value == low):
        span = f"{'over' if over else 'from'} {low:g} to {high:g}"
        raise InvalidRequest(f"'{name}' must be {span}, not {value:g}.", param=name)
    return float(value)


def whole(name: str, value: int | None, default: int, low: int, high: int | None) -> int:
    """Return `value` or `default`; raise when the given value is outside low..high."""
    if value is None:
        return default
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"'{name}' must be {span}, not {_short(value)}.", param=name)
    return value


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "a number of more than 20 digits"


def choices(request: GenerationRequest, settings: ServerSettings) -> int:
    """Return how many answers each prompt gets."""
    return whole("n", request.n, 1, 1, settings.max_choices)


def stop_rules(request: GenerationRequest, settings: ServerSettings) -> StopRules:
    """Return the stop strings. An empty one is refused: it would match everywhere."""
    given = request.stop
    strings = [given] if isinstance(given, str) else list(given or ())
    if len(strings) > settings.max_stops:
        raise InvalidRequest(
            f"'stop' may hold {settings.max_stops} strings, not {len(strings)}.", param="stop"
        )
    if "" in strings:
        raise InvalidRequest("'stop' must not hold an empty string.", param="stop")
    longest = max(map(len, strings), default=0)
    if longest > settings.max_stop_length:
        limit = settings.max_stop_length
        raise InvalidRequest(
            f"A 'stop' string may have {limit} characters, not {longest}.", param="stop"
        )
    return StopRules(
        tuple(dict.fromkeys(strings)),
        bool(request.include_stop_str_in_output),
        whole("min_tokens", request.min_tokens, 0, 0, None),
    )


def build(
    request: GenerationRequest, defaults: GenerationDefaults, vocabulary: Vocabulary
) -> SamplingParams:
    """Return everything but `max_tokens`, `seed` and logprobs, which depend on the call.

    Temperature 0 is argmax, so the filters that could only disturb it are dropped.
    """
    heat = temperature(request.temperature, defaults.temperature)
    params = SamplingParams(
        max_tokens=1,
        min_tokens=whole("min_tokens", request.min_tokens, 0, 0, None),
        temperature=heat,
        top_p=number("top_p", request.top_p, _or(defaults.top_p, 1.0), 0, 1, over=True),
        top_k=top_k(request.top_k, defaults.top_k, vocabulary.size),
        min_p=number("min_p", request.min_p, _or(defaults.min_p, 0.0), 0, 1),
        presence_penalty=number("presence_penalty", request.presence_penalty, 0.0, -2, 2),
        frequency_penalty=number("frequency_penalty", request.frequency_penalty, 0.0, -2, 2),
        repetition_penalty=_repetition(request, defaults),
        logit_bias=logit_bias(request.logit_bias or {}, vocabulary.size),
        eos_token_ids=() if request.ignore_eos else vocabulary.eos_token_ids,
        stop_token_ids=stop_token_ids(request.stop_token_ids or (), vocabulary.size),
    )
    seed_of(request.seed)
    return params if heat else replace(params, top_p=1.0, top_k=0, min_p=0.0)


def _repetition(request: GenerationRequest, defaults: GenerationDefaults) -> float:
    default = _or(defaults.repetition_penalty, 1.0)
    return number("repetition_penalty", request.repetition_penalty, default, 0, 1e6, over=True)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def temperature(value: float | None, default: float | None) -> float:
    """Return a temperature that is 0 (argmax) or large enough to divide by."""
    heat = number("temperature", value, _or(default, 1.0), 0, 2)
    return 0.0 if heat < GREEDY_BELOW else max(heat, COLDEST)


def top_k(value: int | None, default: int | None, vocabulary: int) -> int:
    """Return 0 for off; a value past the vocabulary is the same as all of it."""
    k = whole("top_k", value, default or 0, -1, None)
    return min(max(k, 0), vocabulary)


def logit_bias(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    """Return token id -> bias, clamped to what cannot overflow a softmax."""
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocabulary):
            raise InvalidRequest(
                f"The keys of 'logit_bias' must be token ids from 0 to {vocabulary - 1}.",
                param="logit_bias",
            )
        bias[int(key)] = max(-100.0, min(100.0, float(value)))
    return bias


def stop_token_ids(given: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """Return the ids, each checked against the vocabulary."""
    ids = tuple(dict.fromkeys(given))
    for token in ids:
        whole("stop_token_ids", token, 0, 0, vocabulary - 1)
    return ids


def seed_of(value: int | None) -> int | None:
    """Return the request's seed, or None when each choice is to draw its own."""
    if value is None or value == -1:
        return None
    return whole("seed", value, 0, -INT64, INT64 - 1) & MASK64


def seed_of_choice(seed: int | None, index: int) -> int:
    """Return the seed of choice `index`: one 64-bit mixing step apart, or random without a seed.

    The finaliser of splitmix64 (Steele, Lea, Flood 2014); choices differ, the set repeats.
    """
    if seed is None:
        return secrets.randbits(64)
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def token_budget(
    wanted: int | None, prompt: Sequence[int], max_model_len: int, *, param: str
) -> int:
    """Return how many tokens may follow `prompt`: what was asked for, within the context.

    Raises `ContextTooLong` when not even one fits. None asks for the rest of the context.
    """
    left = max_model_len - len(prompt)
    if left < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{len(prompt)} and at least one more is needed for the answer.",
            param=param,
        )
    return left if wanted is None else min(wanted, left)


def fit(params: SamplingParams, budget: int, asked: int | None) -> SamplingParams:
    """Return `params` for `budget` tokens. Raises when min_tokens is over what was asked for."""
    if asked is not None and params.min_tokens > asked:
        raise InvalidRequest(
            f"'min_tokens' must be at most max_tokens, which is {asked}, not {params.min_tokens}.",
            param="min_tokens",
        )
    return replace(params, max_tokens=budget, min_tokens=min(params.min_tokens, budget))
