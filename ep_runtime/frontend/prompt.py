"""The prompt of a conversation: written by the template, its images loaded, tokenized, and every image given its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request

from ep_runtime.frontend.api.chat_schema import ImagePart, Message, RefusalPart, TextPart, VideoPart
from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.context import Frontend
from ep_runtime.frontend.text_stack import ChatOptions, CheckLeast, RenderedPrompt
from ep_runtime.frontend.vision.errors import MediaError
from ep_runtime.frontend.vision.jobs import Decoded
from ep_runtime.frontend.vision.loader import MediaPart
from ep_runtime.frontend.vision.memory import Hold
from ep_runtime.frontend.vision.placeholders import check_counts, check_literals, expand, write_times
from ep_runtime.frontend.vision.settings import Placeholders
from protocol.messages import EpochReady

UNUSED = {"refusal", "annotations", "parsed"}
"""Fields of messages that are accepted and not used."""


def media_parts(messages: Sequence[Message]) -> list[MediaPart]:
    """The images and videos of a conversation, in its order."""
    found = []
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else []):
            where = f"messages.{index}.content.{place}"
            match part:
                case ImagePart():
                    found.append(MediaPart("image", part.image_url.url, where))
                case VideoPart():
                    found.append(MediaPart("video", part.video_url.url, where))
    return found


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the template side takes them, without the fields that are accepted and not used, and without the URLs."""
    plain = [message.model_dump(exclude_none=True, exclude=UNUSED) for message in messages]
    for message in plain:
        if isinstance(message.get("content"), list):
            message["content"] = [plain_part(part) for part in message["content"]]
        for call in message.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
    return plain


def plain_part(part: dict[str, Any]) -> dict[str, str]:
    """A part as the template side takes it: a refusal is a text, and of an image or a video its kind alone is told."""
    match part["type"]:
        case "text":
            return part
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
    return {"type": part["type"].removesuffix("_url")}


def without_media(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the template side with an empty text in the place of every image and video."""

    def bare(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [part if part["type"] == "text" else {"type": "text", "text": ""} for part in content]

    return [message | {"content": bare(message["content"])} if "content" in message else message for message in messages]


async def check_media(request: Request, front: Frontend, media: Sequence[MediaPart], info: EpochReady) -> None:
    """Raise ApiError when the model does not take these, when there are too many, or when the rest of the body is too large."""
    inputs = front.inputs(info)
    for part in media:
        if part.kind not in inputs:
            taken = " and ".join(inputs)
            text = f"content parts of type '{part.kind}_url' are not supported: the model takes {taken}"
            raise ApiError(400, text, param="messages")
    if len(media) > front.config.max_images:
        text = f"The request has {len(media)} images and videos; the server takes {front.config.max_images}"
        raise ApiError(400, text, param="messages", code="too_many_images")
    size = len(await request.body()) - sum(len(part.url) for part in media)
    if size > front.config.max_request_bytes:
        text = f"The body without its images has {size} bytes; the server takes {front.config.max_request_bytes}"
        raise ApiError(413, text, code="request_too_large")


async def write_prompt(
    front: Frontend,
    messages: Sequence[Message],
    media: Sequence[MediaPart],
    hold: Hold,
    options: ChatOptions,
    check_least: CheckLeast | None = None,
) -> RenderedPrompt:
    """The prompt of a conversation whose parts `check_media` has let through. Raises ApiError.

    `check_least` may raise before anything is loaded or tokenized: it is told how many tokens there are at least.
    """
    loader = front.media
    if loader is None:
        text = await front.text.write_chat(plain_messages(messages), options)
        return RenderedPrompt(text, await front.text.encode(text, options.add_special_tokens, check_least))
    marks = loader.settings.placeholders
    videos = sum(part.kind == "video" for part in media)
    try:
        check_literals(message_texts(messages), marks)
        plain = plain_messages(messages)
        text = await front.text.write_chat(plain, options)
        check_counts(text, len(media) - videos, videos, marks)
        if media:  # one that the template leaves out could pair with a placeholder that is written somewhere in a text
            check_counts(await front.text.write_chat(without_media(plain), options), 0, 0, marks)
        if check_least is not None:
            check_least(front.text.tokenizer.least_tokens(text))
        decoded = await loader.load(media, hold) if media else []
        loaded = list(zip(media, decoded, strict=True))
        return await place_media(front, text, loaded, marks, loader.settings.image.unit, options, check_least)
    except MediaError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="invalid_image") from None


async def place_media(
    front: Frontend,
    text: str,
    loaded: list[tuple[MediaPart, Decoded]],
    marks: Placeholders,
    unit: int,
    options: ChatOptions,
    check_least: CheckLeast | None,
) -> RenderedPrompt:
    """Tokenize the text and give every image its rows. Raises MediaError when they do not pair, and what `check_least` raises."""
    images = [grid for part, decoded in loaded if part.kind == "image" for grid in decoded.grids]
    videos = [decoded for part, decoded in loaded if part.kind == "video"]
    groups = [grid for decoded in videos for grid in decoded.grids]
    text = write_times(text, [decoded.seconds for decoded in videos], marks)
    more = sum(grid.rows - 1 for grid in [*images, *groups])

    def check_whole(least: int) -> None:
        if check_least is not None:
            check_least(least + more)

    ids = await front.text.encode(text, options.add_special_tokens, check_whole)
    expanded, inputs = await asyncio.to_thread(expand, ids, images, groups, marks, unit)
    return RenderedPrompt(text, expanded, inputs)


def message_texts(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Every text that a message's sender wrote, with the name of its field."""
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            yield f"messages.{index}.content", message.content
        elif message.content is not None:
            for place, part in enumerate(message.content):
                match part:
                    case TextPart():
                        yield f"messages.{index}.content.{place}", part.text
                    case RefusalPart():
                        yield f"messages.{index}.content.{place}", part.refusal
