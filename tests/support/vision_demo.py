"""The vision demo's answers by transformers: its processor, its chat template, its `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLMoeForConditionalGeneration

TOKENS = 24


class Reference:
    """transformers' reading of a folder."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.set_experts_implementation("eager")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def answer(self, question: str, pictures: Sequence[Image.Image] = ()) -> str:
        """The greedy answer to a question behind pictures."""
        inputs: dict[str, Any] = {}
        rows: list[int] = []
        if pictures:
            inputs = dict(self._processor(list(pictures), return_tensors="pt"))
            rows = [int(grid.prod()) // self._processor.merge_size**2 for grid in inputs["image_grid_thw"]]
        content = [{"type": "image"}] * len(pictures) + [{"type": "text", "text": question}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        first, *rest = text.split("<|image_pad|>")
        for count, piece in zip(rows, rest, strict=True):
            first += "<|image_pad|>" * count + piece
        tokens = torch.tensor([self._tokenizer(first)["input_ids"]])
        kinds = (tokens == self._model.config.image_token_id).int()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                mm_token_type_ids=kinds,
                max_new_tokens=TOKENS,
                do_sample=False,
                **inputs,
            )
        return str(self._tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))
