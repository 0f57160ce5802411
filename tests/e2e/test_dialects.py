"""The demo model behind /v1/responses and /v1/messages, with the newest clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.oracle.serving import Served, serve

QUESTION = "What is 17 + 25?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
STRICT: Any = {"_strict_response_validation": True}


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "dialects.log"
    with serve("", "--served-model-name", "demo", log=log) as served:
        yield served


@pytest.fixture
def demo(demo_server: Served) -> Iterator[Served]:
    """The server, checked for leftovers after each test."""
    yield demo_server
    demo_server.wait_idle()


@pytest.fixture
def responses(demo: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url, api_key="none", max_retries=0, **STRICT) as client:
        yield client


@pytest.fixture
def messages(demo: Served) -> Iterator[anthropic.Anthropic]:
    url = demo.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, **STRICT) as client:
        yield client


def test_responses(responses: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "temperature": 0}
    answer = responses.responses.create(**fields, input=QUESTION)
    assert (answer.output_text, answer.status) == ("42", "completed")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    with responses.responses.stream(**fields, input=ASKED) as stream:
        final = stream.get_final_response()
    assert final.output_text == "42"
    assert final.usage is not None
    assert final.usage.input_tokens == answer.usage.input_tokens
    history = [*ASKED, *answer.output, {"role": "user", "content": "What is 20 + 5?"}]
    assert responses.responses.create(**fields, input=history).status == "completed"


class Size(BaseModel):
    size: Literal["small", "large"]


def test_a_response_of_a_given_form(responses: openai.OpenAI) -> None:
    parsed = responses.responses.parse(
        model="demo", input=QUESTION, text_format=Size, temperature=0
    )
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.size in ("small", "large")
    with responses.responses.stream(model="demo", input=QUESTION, text_format=Size) as stream:
        assert stream.get_final_response().output_parsed is not None


def test_messages(messages: anthropic.Anthropic) -> None:
    fields: Any = {"model": "demo", "messages": ASKED, "max_tokens": 50}
    fields["extra_body"] = {"temperature": 0}
    answer: Any = messages.messages.create(**fields)
    assert (answer.content[0].text, answer.stop_reason) == ("42", "end_turn")
    with messages.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "42"
    counted = messages.messages.count_tokens(model="demo", messages=ASKED)
    for usage in (answer.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def test_leaving_a_stream_frees_everything(
    demo: Served, responses: openai.OpenAI, messages: anthropic.Anthropic
) -> None:
    forever = {"ignore_eos": True}
    stream = responses.responses.create(
        model="demo", input=QUESTION, stream=True, extra_body=forever
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    demo.wait_idle()
    other = messages.messages.create(
        model="demo", messages=ASKED, max_tokens=10**6, stream=True, extra_body=forever
    )
    for found in other:
        if found.type == "content_block_delta":
            break
    other.close()
    demo.wait_idle()
