from __future__ import annotations

import pytest

from moestro.errors import ContextTooLong, InvalidRequest, QueueFull
from moestro.scheduler.limits import Limits, check
from moestro.types import Request, SamplingParams

LIMITS = Limits(
    max_model_len=20,
    max_num_seqs=2,
    max_num_queued=3,
    vocab_size=10,
    kv_tokens=32,
    max_sweep_tokens=8,
)


def request(prompt: int | tuple[int, ...], max_tokens: int = 1, **rest: object) -> Request:
    tokens = (1,) * prompt if isinstance(prompt, int) else prompt
    generated = rest.pop("generated", ())
    return Request("a", tokens, SamplingParams(max_tokens, **rest), generated=generated)


def test_the_context_is_the_limit_to_the_token() -> None:
    check(request(18), LIMITS, 0)
    check(request(19), LIMITS, 0)
    check(request(20, max_tokens=0), LIMITS, 0)
    for wrong in (request(20), request(21), request(21, max_tokens=0)):
        with pytest.raises(ContextTooLong, match="maximum context length is 20 tokens") as got:
            check(wrong, LIMITS, 0)
        assert got.value.code == "context_length_exceeded"
        assert str(len(wrong.prompt)) in got.value.message
    check(request(19, max_tokens=1000), LIMITS, 0)  # how much it may generate is clamped


def test_a_prompt_that_never_fits_the_pool_is_refused_with_both_numbers() -> None:
    limits = Limits(1000, 2, 3, 10, kv_tokens=32, max_sweep_tokens=8)
    check(request(31), limits, 0)
    for length in (32, 33):
        with pytest.raises(ContextTooLong, match="maximum context length is 32 tokens") as got:
            check(request(length), limits, 0)
        assert f"prompt has {length}" in got.value.message
    check(request(30, 9, generated=(1, 2)), limits, 0)  # it got so far before and may go on
    with pytest.raises(ContextTooLong):
        check(request(31, 9, generated=(1, 2)), limits, 0)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (request(()), "prompt"),
        (request((1, 10)), "prompt"),
        (request((-1,)), "prompt"),
        (request((1,), 5, generated=(10,)), "prompt"),
        (request((1,), stop_token_ids=(3, 10)), "stop_token_ids"),
        (request((1,), stop_token_ids=(-1,)), "stop_token_ids"),
        (request((1,), logit_bias={99_999_999: 5.0}), "logit_bias"),
        (request((1,), logit_bias={-1: 5.0}), "logit_bias"),
        (request((1,), max_tokens=-1), "max_tokens"),
        (request((1,), 2, generated=(1, 2)), "max_tokens"),
        (request((1,), 2, min_tokens=3), "min_tokens"),
        (request((1,), 2, min_tokens=-1), "min_tokens"),
    ],
)
def test_what_cannot_be_served_names_its_field(wrong: Request, param: str) -> None:
    with pytest.raises(InvalidRequest) as got:
        check(wrong, LIMITS, 0)
    assert got.value.param == param
    assert got.value.status == 400


def test_ids_at_the_edge_of_the_vocabulary_are_fine() -> None:
    check(request((0, 9), 5, stop_token_ids=(0, 9), logit_bias={0: 1.0, 9: -1.0}), LIMITS, 0)


def test_the_queue() -> None:
    check(request(1), LIMITS, 2)
    with pytest.raises(QueueFull, match="3 requests wait"):
        check(request(1), LIMITS, 3)
    none = Limits(20, 2, 0, 10, 32, 8)
    check(request(1), none, -1)
    with pytest.raises(QueueFull) as got:
        check(request(1), none, 0)
    assert (got.value.status, got.value.code) == (503, "queue_full")


def test_limits_are_positive() -> None:
    with pytest.raises(AssertionError):
        Limits(0, 1, 1, 1, 1, 1)
    with pytest.raises(AssertionError):
        Limits(1, 1, -1, 1, 1, 1)
