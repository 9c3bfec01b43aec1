"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ep_runtime.frontend.api.chat_schema import Message
from ep_runtime.frontend.api.errors import BODY_ERRORS, GENERATION_ERRORS, ApiError
from ep_runtime.frontend.api.streaming import while_connected
from ep_runtime.frontend.api.strict_json import StrictRoute
from ep_runtime.frontend.api.tokenize_schema import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from ep_runtime.frontend.context import Frontend, frontend_of
from ep_runtime.frontend.prompt import check_media, media_parts, write_prompt
from ep_runtime.frontend.text_stack import ChatOptions

router = APIRouter(tags=["tokens"], route_class=StrictRoute)


@router.post("/tokenize", response_model=TokenizeResponse, responses=GENERATION_ERRORS)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it, the placeholders of its images among them."""
    front = frontend_of(request)
    front.check_model(body.model)
    if body.messages is not None:
        ids = await tokenize_messages(request, front, body.messages, body)
    else:
        ids = await front.text.encode(body.prompt or "", body.add_special_tokens is not False)
    info = front.engine.info
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": None if info is None else info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [front.text.tokenizer.token_text(token) for token in ids]
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def tokenize_messages(request: Request, front: Frontend, messages: list[Message], body: TokenizeRequest) -> list[int]:
    """A conversation's token ids. One with images needs an engine, which says that it takes them, and a place in the queue."""
    options = ChatOptions(
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
    )
    media = media_parts(messages)
    with front.image_memory.holding() as hold:
        if not media:
            return (await write_prompt(front, messages, media, hold, options)).ids
        info = await front.reach_engine()
        with front.preparing(info, 1):
            await check_media(request, front, media, info)
            writing = write_prompt(front, messages, media, hold, options)
            return (await while_connected(request.receive, writing)).ids


@router.post("/detokenize", response_model=DetokenizeResponse, responses=BODY_ERRORS)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Text of token ids, special tokens included."""
    front = frontend_of(request)
    front.check_model(body.model)
    size = front.text.tokenizer.vocab_size
    token = max(body.tokens, default=0)
    if token >= size:
        raise ApiError(400, f"tokens has the id {token}, outside the vocabulary of {size}", param="tokens")
    return JSONResponse({"prompt": await front.text.decode(body.tokens)})
