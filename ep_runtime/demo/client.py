"""Asks a running server one question, about pictures if any, with the official `openai` client and streams the answer."""

from __future__ import annotations

import argparse
import base64
import mimetypes
import sys
from collections.abc import Sequence
from pathlib import Path

import openai
from openai.types.chat import (
    ChatCompletionContentPartImageParam,
    ChatCompletionContentPartParam,
    ChatCompletionContentPartTextParam,
)

QUESTION = "What is the capital of France? Answer in one sentence."


class WrongAnswer(Exception):
    """The model did not say what is right; the message has both."""


def ask(base_url: str, question: str, api_key: str = "none", pictures: Sequence[str] = ()) -> str:
    """Print the answer as it comes, and return it. `pictures` are URLs of images, which stand before the question.

    Raises `openai.APIError` when the server refuses or the stream breaks.
    """
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content_of(question, pictures)}],
        temperature=0.0,
        max_tokens=128,
        stream=True,
    )
    answer = ""
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
    print(flush=True)
    return answer


def content_of(question: str, pictures: Sequence[str]) -> str | list[ChatCompletionContentPartParam]:
    """Content of a user's message: the text alone, or parts where there are pictures."""
    if not pictures:
        return question
    images = [ChatCompletionContentPartImageParam(type="image_url", image_url={"url": url}) for url in pictures]
    return [*images, ChatCompletionContentPartTextParam(type="text", text=question)]


def file_uri(path: Path) -> str:
    """The file as a `data:` URI; its name says what type it has."""
    media_type = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def main() -> int:
    """`python -m ep_runtime.demo.client [--base-url URL] [--picture FILE] [QUESTION]`; exit status 0 when an answer came."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.demo.client", description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, action="append", default=[], help="an image to ask about; may be repeated"
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    flags = parser.parse_args()
    try:
        pictures = [file_uri(path) for path in flags.picture]
        return 0 if ask(flags.base_url, flags.question, flags.api_key, pictures).strip() else 1
    except (openai.APIError, OSError) as error:
        print(f"the server did not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
