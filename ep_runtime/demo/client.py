"""Asks a running server one question with the official `openai` client and streams the answer to the terminal."""

from __future__ import annotations

import argparse
import sys

import openai

QUESTION = "What is the capital of France? Answer in one sentence."


def ask(base_url: str, question: str, api_key: str = "none") -> str:
    """Print the answer as it comes, and return it. Raises `openai.APIError` when the server refuses or the stream breaks."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
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


def main() -> int:
    """`python -m ep_runtime.demo.client [--base-url URL] [QUESTION]`; exit status 0 when an answer came."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.demo.client", description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    flags = parser.parse_args()
    try:
        return 0 if ask(flags.base_url, flags.question, flags.api_key).strip() else 1
    except openai.APIError as error:
        print(f"the server did not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
