"""POST /tokenize and /detokenize. Owns: their two bodies (vLLM's, with SGLang's additions)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moestro.errors import InvalidRequest
from moestro.server.chat import render_options, tool_variables
from moestro.server.completions import check_ids
from moestro.server.refusals import REFUSED, check_extra
from moestro.server.schema import DetokenizeRequest, TokenizeRequest, validate
from moestro.server.service import Service, body_of
from moestro.server.wire import reply


async def tokenize(request: Request, service: Service) -> Response:
    """Answer with the ids of a prompt, of a list of prompts, or of a rendered conversation."""
    wanted = validate(TokenizeRequest, await body_of(request))
    check_extra(wanted.model_extra or {}, REFUSED, service.unknown)
    service.model_name(wanted.model)
    texts, special = await _texts(wanted, service)
    ids = [await service.text.encode(text, special=special) for text in texts]
    info = service.engine.info
    body: dict[str, Any] = {
        "count": [len(i) for i in ids],
        "max_model_len": None if info is None else info.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if wanted.return_token_strs:
        body["token_strs"] = [[service.text.tokenizer.name_of(i) for i in each] for each in ids]
    if not isinstance(wanted.prompt, list):
        body.update({key: body[key][0] for key in ("count", "tokens", "token_strs") if body[key]})
    return reply(body)


async def _texts(wanted: TokenizeRequest, service: Service) -> tuple[list[str], bool]:
    if (wanted.prompt is None) == (wanted.messages is None):
        raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if wanted.messages is not None:
        options = render_options(wanted, service.settings, tool_variables(wanted.tools))
        text = await service.text.render(
            wanted.messages, options, service.settings.template_timeout
        )
        return [text], bool(wanted.add_special_tokens)
    given = wanted.prompt
    texts = [given] if isinstance(given, str) else list(given or ())
    if len(texts) > service.settings.max_prompts:
        raise InvalidRequest(
            f"'prompt' may hold {service.settings.max_prompts} prompts, not {len(texts)}.",
            param="prompt",
        )
    return texts, wanted.add_special_tokens is not False


async def detokenize(request: Request, service: Service) -> Response:
    """Answer with the text of the ids, special tokens spelled out."""
    wanted = validate(DetokenizeRequest, await body_of(request))
    check_extra(wanted.model_extra or {}, REFUSED, service.unknown)
    service.model_name(wanted.model)
    info = service.engine.info
    size = service.text.tokenizer.size if info is None else info.vocab_size
    check_ids(wanted.tokens, size, "tokens")
    text = await service.text.run(_decode, service, wanted.tokens)
    return reply({"prompt": text, "text": text})


def _decode(service: Service, ids: list[int]) -> str:
    return service.text.tokenizer.decode(ids, skip_special=False)
