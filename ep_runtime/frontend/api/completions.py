"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from ep_runtime.frontend.api.answer import answer
from ep_runtime.frontend.api.chat import STREAM_CONTENT
from ep_runtime.frontend.api.completion_answer import Completion, CompletionWriter
from ep_runtime.frontend.api.completion_schema import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from ep_runtime.frontend.api.errors import GENERATION_ERRORS, ApiError
from ep_runtime.frontend.api.strict_json import StrictRoute
from ep_runtime.frontend.choice import Choice
from ep_runtime.frontend.context import Frontend, frontend_of
from ep_runtime.frontend.defaults import SamplingDefaults
from ep_runtime.frontend.grammar_driver import GrammarDriver
from ep_runtime.frontend.reasoning_gate import MaskSource
from ep_runtime.frontend.sampling import check_least, check_token_ids, derive_seed, draw_seed, given, sampling_params, token_budget
from ep_runtime.frontend.text_stack import OutputRules, RenderedPrompt
from protocol.commands import Loops
from protocol.messages import EpochReady, Submit

router = APIRouter(tags=["generation"], route_class=StrictRoute)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={**GENERATION_ERRORS, 200: {"description": "The texts, or with `stream` their server-sent events", **STREAM_CONTENT}},
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts."""
    front = frontend_of(request)
    front.check_model(body.model)
    info = await front.reach_engine()
    loops = front.loops(body, info)
    count = len(body.prompts) * body.n
    with front.preparing(info, count):
        prompts = [await encode_prompt(front, body, prompt, info) for prompt in body.prompts]
        grammars = await make_grammars(front, body, prompts)
    group = f"cmpl-{uuid.uuid4().hex}"
    masks = [b"" if grammar is None else grammar[1] for grammar in grammars]
    submits = make_submits(body, front.text.defaults, prompts, info, group, f"{front.engine.prefix}{group}", masks, loops)
    # Time has passed in threads: what was checked at the start must still hold.
    front.open_engine()
    front.admit(info, count)
    rules = OutputRules(
        stops=body.stops,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
    )
    choices = [Choice(index, front.text.parts(prompts[index // body.n], rules)) for index in range(count)]
    writer = make_writer(front, body, prompts, choices, group, looped=loops is not None)
    generation = front.generation(body.stream)
    drivers = [None if grammar is None else GrammarDriver(grammar[0], front.text.mask_pool) for grammar in grammars]
    generation.start(submits, choices, drivers)
    return await answer(request, front, generation, writer, body.stream, group)


def make_submits(
    body: CompletionRequest,
    defaults: SamplingDefaults,
    prompts: list[RenderedPrompt],
    info: EpochReady,
    group: str,
    prefix: str,
    masks: list[bytes],
    loops: Loops | None,
) -> list[Submit]:
    """One Submit a sample, prompt by prompt, with ids from `prefix`. Sample i has the same seed for every prompt of a list."""
    seed = draw_seed() if body.seed is None else body.seed
    echoed = body.logprobs if body.echo else None
    wanted = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    most = min(DEFAULT_MAX_TOKENS, given(defaults.max_new_tokens, DEFAULT_MAX_TOKENS))
    submits: list[Submit] = []
    for prompt in prompts:
        # With max_tokens 0 one token is generated and not shown: the engine computes prompt logprobs on the way to it.
        budget = max(1, token_budget(len(prompt.ids), body.max_tokens, info.max_model_len, most))
        for sample in range(body.n):
            index = len(submits)
            params = sampling_params(
                body,
                defaults,
                seed=derive_seed(seed, sample),
                max_tokens=budget,
                vocab_size=info.vocab_size,
                logprobs=body.logprobs,
                prompt_logprobs=max(wanted) if wanted else None,
                grammar=masks[index] != b"",
                loops=loops,
            )
            submits.append(
                Submit(
                    request_id=f"{prefix}-{index}",
                    group=group,
                    prompt=prompt.ids,
                    sampling=params,
                    priority=body.priority,
                    mask=masks[index],
                )
            )
    return submits


def make_writer(
    front: Frontend, body: CompletionRequest, prompts: list[RenderedPrompt], choices: list[Choice], group: str, *, looped: bool
) -> CompletionWriter:
    """The writer of this request's answer; a prompt given as ids is echoed as their text."""
    return CompletionWriter(
        head={"id": group, "created": int(time.time()), "model": body.model or front.model_name},
        texts=front.text.texts,
        prompts=[(prompt.ids, prompt.text if body.echo else "") for prompt in prompts],
        choices=choices,
        samples=body.n,
        top=body.logprobs,
        echo=body.echo,
        silent=body.max_tokens == 0,
        token_ids=body.return_token_ids,
        looped=looped,
        prompt_logprobs=body.prompt_logprobs is not None,
        include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
    )


async def encode_prompt(front: Frontend, body: CompletionRequest, prompt: Prompt, info: EpochReady) -> RenderedPrompt:
    """Token ids of one prompt; 400 when there are none or certainly too many, or one is outside the vocabulary."""
    if isinstance(prompt, str):
        ids = await front.text.encode(
            prompt, body.add_special_tokens, lambda least: check_least(least, body.max_tokens, info.max_model_len)
        )
        if not ids:
            raise ApiError(400, "prompt is empty", param="prompt")
        return RenderedPrompt(prompt, ids)
    check_token_ids(prompt, info.vocab_size, "prompt")
    token_budget(len(prompt), body.max_tokens, info.max_model_len)
    return RenderedPrompt(await front.text.decode(prompt) if body.echo else "", prompt)


async def make_grammars(
    front: Frontend, body: CompletionRequest, prompts: list[RenderedPrompt]
) -> Sequence[tuple[MaskSource, bytes] | None]:
    """Each sample's grammar with its first mask, None for free text. One compilation serves all prompts and samples."""
    count = len(prompts) * body.n
    if body.response_format is None or body.response_format.type == "text":
        return [None] * count
    schema = body.response_format.json_schema.schema_ if body.response_format.type == "json_schema" else None
    grammar = await front.text.response_grammar(schema)
    return await front.text.constrain(grammar, prompts[0], count, reasoning=False)
