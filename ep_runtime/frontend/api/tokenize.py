"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ep_runtime.frontend.api.chat import plain_messages
from ep_runtime.frontend.api.errors import BODY_ERRORS, ApiError
from ep_runtime.frontend.api.strict_json import StrictRoute
from ep_runtime.frontend.api.tokenize_schema import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from ep_runtime.frontend.context import frontend_of

router = APIRouter(tags=["tokens"], route_class=StrictRoute)


@router.post("/tokenize", response_model=TokenizeResponse, responses=BODY_ERRORS)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    front = frontend_of(request)
    front.check_model(body.model)
    if body.messages is not None:
        prompt = await front.text.render(
            plain_messages(body.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs or {},
            add_special_tokens=bool(body.add_special_tokens),
        )
        ids = prompt.ids
    else:
        ids = await front.text.encode(body.prompt or "", body.add_special_tokens is not False)
    info = front.engine.info
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": None if info is None else info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [front.text.tokenizer.token_text(token) for token in ids]
    return Response(msgspec.json.encode(answer), media_type="application/json")


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
