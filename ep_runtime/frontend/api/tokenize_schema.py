"""Models of /tokenize and /detokenize, as vLLM names them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from ep_runtime.frontend.api.chat_schema import Message, Tool
from ep_runtime.frontend.api.common_schema import RequestBody, TokenId, refuse


class TokenizeRequest(RequestBody):
    """Text, or messages to be rendered by the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(default=None, description="true for a prompt, false for messages, when absent")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "give either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    """Token ids, how many, and the model's limit (null until an engine has reported)."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str
