"""What a chat's answer must match, from everything in the request that says so.

Owns: which of answer, calls and reasoning a grammar has to know of. Does not own: the fields
themselves (`structured`, `tools_rules`), or the grammar (`structured_plan`).
"""

from __future__ import annotations

from dataclasses import replace

from moestro.server.reasoning import Marks
from moestro.server.schema import ChatRequest
from moestro.server.service import Service
from moestro.server.structured import constraint_of
from moestro.server.structured_plan import Plan
from moestro.server.tools_choose import HARMONY, MARKS, reasoning_parser, tool_parser
from moestro.server.tools_request import checked_tools, strict_of
from moestro.server.tools_rules import calls_of, choice_of


def plan_of(request: ChatRequest, service: Service) -> Plan:
    """Return what is asked of the answer, before there is a prompt. Raises `InvalidRequest`."""
    settings, template = service.settings, service.text.template
    source = template.source if template is not None else ""
    family = tool_parser(settings.tool_call_parser, source, settings.model_type)
    reasoning = reasoning_parser(settings.reasoning_parser, source, settings.model_type)
    tools = checked_tools(request.tools)
    calls = calls_of(
        choice_of(request.tool_choice, tools),
        tools,
        strict=strict_of(request.tools),
        parallel=request.parallel_tool_calls is not False,
        family=family,
        template=source,
    )
    return Plan(
        constraint_of(request), calls, MARKS.get(reasoning), harmony=HARMONY in (family, reasoning)
    )


def for_prompt(plan: Plan, request: ChatRequest, prompt: str) -> Plan:
    """Return the plan for what the rendered prompt leaves to the answer."""
    if plan.marks is None:
        return plan
    if opened(request, prompt, plan.marks):
        return replace(plan, opened=True)
    closed = prompt.rstrip().endswith(plan.marks.close)
    return replace(plan, marks=None) if closed else plan


def opened(request: ChatRequest, prompt: str, marks: Marks | None) -> bool:
    """Whether the answer begins inside the reasoning."""
    if marks is None:
        return False
    last = request.messages[-1] if request.continue_final_message else None
    content = last.get("content") if isinstance(last, dict) else None
    left = isinstance(content, str) and marks.left_open_in(content)
    return left or marks.opened_by(prompt)
