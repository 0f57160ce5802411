"""POST /v1/messages, up to admission, and count_tokens. Owns: the way to a chat request."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moestro.server.call import Call
from moestro.server.chat import answer_format, chat_prompt, checked_chat, prepare_chat
from moestro.server.dialect import Fields, Names, called
from moestro.server.messages_input import messages_of
from moestro.server.messages_request import chat_body, names_of
from moestro.server.messages_schema import CountTokensRequest, MessagesRequest
from moestro.server.schema import validate
from moestro.server.service import Service, body_of
from moestro.server.wire import reply


async def prepare_messages(service: Service, body: dict[str, Any], arrived: float) -> Call:
    """Return the call that a request body asks for. Raises `InvalidRequest` and its kin."""
    chat, names = _chat(validate(MessagesRequest, body), service)
    with called(names):
        return names.call(await prepare_chat(service, chat, arrived, prefix="msg_"))


async def count_tokens(request: Request, service: Service) -> Response:
    """Count the tokens of a prompt as /v1/messages would make it, tools included."""
    wanted = validate(CountTokensRequest, await body_of(request))
    chat, names = _chat(wanted, service)
    with called(names):
        checked = checked_chat(service, chat)
        service.model_name(checked.model)
        answer_format(checked, service)  # tools that cannot be honoured are refused here too
        _, ids = await chat_prompt(service, checked)
    return reply({"input_tokens": len(ids)})


def _chat(request: CountTokensRequest, service: Service) -> tuple[Fields, Names]:
    messages, origins = messages_of(request.messages, request.system)
    return chat_body(request, messages, service.unknown), names_of(origins)
