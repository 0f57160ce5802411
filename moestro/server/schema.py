"""The OpenAI wire models: which keys a request may carry and of what type.

Owns: types, and the error that names a wrongly typed field. Does not own: ranges (`sampling`),
messages (`conversation`) or what is refused for now (`refusals`). Unknown keys are kept aside.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from moestro.errors import InvalidRequest

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
Str = Annotated[str, Strict()]


class Wire(BaseModel):
    """A JSON object of the API. null is the same as absent; unknown keys land in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), hide_input_in_errors=True)


class StreamOptions(Wire):
    """`stream_options`."""

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None
    include_obfuscation: Bool | None = None  # padding against traffic analysis: not offered


class GenerationRequest(Wire):
    """What chat and plain completions share."""

    model: Str | None = None
    max_tokens: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: dict[Str, Float] | None = None
    seed: Int | None = None
    n: Int | None = None
    stop: Str | list[Str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: Bool | None = None
    min_tokens: Int | None = None
    ignore_eos: Bool | None = None
    skip_special_tokens: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None
    add_special_tokens: Bool | None = None
    priority: Int | None = None
    cache_salt: Str | None = None
    request_id: Str | None = None
    # the form of the answer: see `structured`
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | Str | None = None
    guided_json_object: Bool | None = None
    guided_regex: Str | None = None
    guided_choice: list[Str] | None = None
    guided_grammar: Str | None = None
    json_schema: dict[str, Any] | Str | None = None
    regex: Str | None = None
    ebnf: Str | None = None
    grammar: Str | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. Messages are checked by `conversation`."""

    messages: list[Any]
    max_completion_tokens: Int | None = None
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[Str, Any] | None = None
    reasoning_effort: Str | None = None
    include_reasoning: Bool | None = None
    separate_reasoning: Bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Bool | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: Int | None = None
    echo: Bool | None = None


class TokenizeRequest(Wire):
    """POST /tokenize, with a `prompt` or with `messages`."""

    model: Str | None = None
    prompt: Str | list[Str] | None = None
    messages: list[Any] | None = None
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[Str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: Bool | None = None


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model: Str | None = None
    tokens: list[Int]


Model = TypeVar("Model", bound=Wire)

# pydantic's own words for these either show the input or speak of Python types
REASONS = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """Return the typed request. Raises `InvalidRequest` naming the first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        raise _explain(model, exc) from None


def _explain(model: type[Wire], exc: ValidationError) -> InvalidRequest:
    errors = exc.errors(include_input=False, include_url=False, include_context=False)
    path = _path(model, errors[0]["loc"])
    kinds = [e["type"] for e in errors if _path(model, e["loc"])[:1] == path[:1]]
    reasons = [REASONS.get(kind, "is not valid") for kind in dict.fromkeys(kinds)]
    param = ".".join(path)
    wanted = " or ".join(reasons[:2])
    return InvalidRequest(f"'{param}' {wanted}.", param=param)


def _path(model: type[Wire], loc: tuple[int | str, ...]) -> list[str]:
    """Drop pydantic's names of union branches and the client's own keys from a location."""
    field = str(loc[0])
    rest = [str(part) for part in loc[1:] if isinstance(part, int)]
    nested = loc[1] if len(loc) > 1 else None
    if field == "stream_options" and nested in StreamOptions.model_fields:
        return [field, str(nested)]
    return [field, *rest]
