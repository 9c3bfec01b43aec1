"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ep_runtime.frontend.api.answer import answer
from ep_runtime.frontend.api.chat_answer import ChatCompletion, ChatWriter
from ep_runtime.frontend.api.chat_schema import ChatRequest, NamedToolChoice
from ep_runtime.frontend.api.errors import GENERATION_ERRORS, ApiError
from ep_runtime.frontend.api.streaming import while_connected
from ep_runtime.frontend.api.strict_json import StrictRoute
from ep_runtime.frontend.choice import Choice
from ep_runtime.frontend.context import Frontend, frontend_of
from ep_runtime.frontend.grammar_driver import GrammarDriver
from ep_runtime.frontend.prompt import check_media, media_parts, write_prompt
from ep_runtime.frontend.reasoning_gate import MaskSource
from ep_runtime.frontend.sampling import check_least, derive_seed, draw_seed, sampling_params, token_budget
from ep_runtime.frontend.text_stack import ChatOptions, OutputRules, RenderedPrompt
from ep_runtime.frontend.vision.memory import Hold
from protocol.commands import Loops
from protocol.messages import EpochReady, SamplingParams, Submit

router = APIRouter(tags=["generation"], route_class=StrictRoute)

STREAM_CONTENT: dict[str, Any] = {"content": {"text/event-stream": {}}}


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**GENERATION_ERRORS, 200: {"description": "The answer, or with `stream` its server-sent events", **STREAM_CONTENT}},
)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    front = frontend_of(request)
    front.check_model(body.model)
    check_tools_served(front, body)
    info = await front.reach_engine()
    loops = front.loops(body, info)
    with front.preparing(info, body.n), front.image_memory.holding(body.n) as hold:
        prompt = await render(request, front, body, info, hold)
        sampling = make_sampling(front, body, prompt, info, loops)
        grammars = await make_grammars(front, body, prompt)
    # Time has passed in threads: what was checked at the start must still hold.
    front.open_engine()
    front.admit(info, body.n)
    return await run(request, front, body, prompt, sampling, grammars)


def make_sampling(
    front: Frontend, body: ChatRequest, prompt: RenderedPrompt, info: EpochReady, loops: Loops | None
) -> list[SamplingParams]:
    """Each sample's parameters."""
    budget = token_budget(len(prompt.ids), body.token_limit, info.max_model_len, front.text.defaults.max_new_tokens)
    top = (body.top_logprobs or 0) if body.logprobs else None
    seed = draw_seed() if body.seed is None else body.seed
    return [
        sampling_params(
            body,
            front.text.defaults,
            seed=derive_seed(seed, index),
            max_tokens=budget,
            vocab_size=info.vocab_size,
            logprobs=top,
            prompt_logprobs=body.prompt_logprobs if index == 0 else None,
            grammar=body.has_grammar,
            loops=loops,
        )
        for index in range(body.n)
    ]


async def run(
    request: Request,
    front: Frontend,
    body: ChatRequest,
    prompt: RenderedPrompt,
    sampling: list[SamplingParams],
    grammars: Sequence[tuple[MaskSource, bytes] | None],
) -> Response:
    """Start the sequences and answer with what they give."""
    group = f"chatcmpl-{uuid.uuid4().hex}"
    choices = [Choice(index, front.text.parts(prompt, output_rules(body))) for index in range(body.n)]
    submits = [
        Submit(
            request_id=f"{front.engine.prefix}{group}-{index}",
            group=group,
            prompt=prompt.ids,
            sampling=params,
            priority=body.priority,
            mask=b"" if grammar is None else grammar[1],
            images=prompt.images,
        )
        for index, (params, grammar) in enumerate(zip(sampling, grammars, strict=True))
    ]
    writer = ChatWriter(
        head={"id": group, "created": int(time.time()), "model": body.model or front.model_name},
        texts=front.text.texts,
        prompt=prompt.ids,
        choices=choices,
        top=sampling[0].logprobs,
        token_ids=body.return_token_ids,
        looped=sampling[0].loops is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
    )
    generation = front.generation(body.stream)
    drivers = [None if grammar is None else GrammarDriver(grammar[0], front.text.mask_pool) for grammar in grammars]
    generation.start(submits, choices, drivers)
    return await answer(request, front, generation, writer, body.stream, group)


async def render(request: Request, front: Frontend, body: ChatRequest, info: EpochReady, hold: Hold) -> RenderedPrompt:
    """The prompt that the chat template writes, with its images; 400 when it is empty, or certainly too long.

    Raises ClientGone when the client goes while its images are loaded.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    generate = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    options = ChatOptions(
        tools=body.active_tools,
        add_generation_prompt=generate,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
        add_special_tokens=body.add_special_tokens,
    )
    media = media_parts(body.messages)
    await check_media(request, front, media, info)
    writing = write_prompt(
        front, body.messages, media, hold, options, lambda least: check_least(least, body.token_limit, info.max_model_len)
    )
    prompt = await (while_connected(request.receive, writing) if media else writing)
    if not prompt.ids:
        raise ApiError(400, "The rendered prompt is empty", param="messages")
    return prompt


def check_tools_served(front: Frontend, body: ChatRequest) -> None:
    """400 when tools are offered to a model whose output is not searched for calls: they would be lost in silence."""
    if body.active_tools and front.text.tool_parser_name == "none":
        raise ApiError(400, "tools are not supported by this model's chat template", param="tools", code="tools_unsupported")


def output_rules(body: ChatRequest) -> OutputRules:
    """How the answer is cut up. A forced function ends with `stop`, as in OpenAI's API."""
    return OutputRules(
        stops=body.stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
        reasoning=True,
        tools=body.active_tools or None,
        form="calls" if body.forces_tool else "calls or json" if body.wants_json else "free",
        single_tool_call=body.parallel_tool_calls is False,
        tool_finish="stop" if isinstance(body.tool_choice, NamedToolChoice) else "tool_calls",
    )


async def make_grammars(front: Frontend, body: ChatRequest, prompt: RenderedPrompt) -> Sequence[tuple[MaskSource, bytes] | None]:
    """Each sample's grammar with its first mask, None for free text. One compilation serves all samples."""
    if not body.has_grammar:
        return [None] * body.n
    tools, parallel = body.callable_tools, body.parallel_tool_calls is not False
    if body.forces_tool:
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedToolChoice) else "required"
        grammar = await front.text.tool_grammar(tools, choice, parallel)
    elif not body.wants_json:
        grammar = await front.text.words_grammar(tools, parallel)
    elif tools:
        grammar = await front.text.either_grammar(tools, body.response_schema, parallel)
    else:
        grammar = await front.text.response_grammar(body.response_schema)
    return await front.text.constrain(grammar, prompt, body.n, reasoning=True)
