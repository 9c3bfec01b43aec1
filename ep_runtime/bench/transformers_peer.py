"""Times of transformers' own model on one device: `python -m ep_runtime.bench.transformers_peer JOB OUT`, started by `peer`.

Bare forwards in a loop, without `generate`, torch.compile or CUDA graphs. For every shape the fastest of its ways to run experts
and of its caches is found first, over a few tokens; what is measured waits for the device at the ends of a loop alone.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from ep_runtime.bench.peer import Cell
from ep_runtime.bench.session import random_prompts
from ep_runtime.bench.transformers_cache import cache_argument
from ep_runtime.engine.main import pick_device
from ep_runtime.engine.rank import choose_dtype

EXPERTS = ("grouped_mm", "batched_mm", "eager")
CACHES = ("dynamic", "static")
TRIAL_TOKENS = 8
DUMMY_RANGE = 1e-3
"""Uniform within plus and minus this: the dummy weights of ours."""

FAILURES = (NotImplementedError, RuntimeError, ValueError, KeyError, AttributeError, TypeError, OSError)
"""What a shape or a model that it cannot run raises; no memory is a RuntimeError."""


class Peer:
    """A loaded model, and its ways to run."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.ways = list(itertools.product(EXPERTS if hasattr(model, "set_experts_implementation") else ("",), CACHES))

    def measure(self, cell: Cell, repeat: int, given: list[int] | None) -> dict[str, Any]:
        """The entry of one shape: `step_ms` of decoding, or for one new token `seconds` of the prompts; or the `error`."""
        prompts = [given] * cell.batch if given is not None else random_prompts(cell.batch, cell.prompt_len, self._vocab_size)
        ids = torch.tensor(prompts, device=self._device)
        about: dict[str, Any] = {"batch": cell.batch, "prompt_len": ids.shape[1]}
        best, failures = self._trials(ids, min(TRIAL_TOKENS, cell.new_tokens))
        if not best:
            return about | {"error": "; ".join(failures)}
        way = min(best, key=lambda one: best[one])
        try:
            runs = [self.run(ids, cell.new_tokens, way) for _ in range(repeat)]
        except FAILURES as error:
            return about | {"error": _short(error)}
        kind = "seconds" if cell.new_tokens == 1 else "step_ms"
        times = [one[kind] for one in runs]
        names = {"way": ", ".join(part for part in way if part), "attention": self._model.config._attn_implementation}
        trials = {", ".join(one): value for one, value in best.items()}
        return about | {kind: statistics.median(times), "all": times, "tokens": runs[0]["tokens"], "trials": trials, **names}

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, new_tokens: int, way: tuple[str, str]) -> dict[str, Any]:
        """Greedy: seconds of the prompts, milliseconds a step after them, the first sequence's tokens. ids: `[batch, length]`."""
        if way[0]:
            self._model.set_experts_implementation(way[0])
        cache = cache_argument(self._model, self._cache(way[1], ids.shape[1] + new_tokens))
        started = self._now()
        output = self._model(input_ids=ids, **cache, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        prompted = self._now()
        tokens = [token]
        for _ in range(new_tokens - 1):
            output = self._model(input_ids=token, **cache, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        ended = self._now()
        steps = max(1, new_tokens - 1)
        return {
            "seconds": prompted - started,
            "step_ms": 1e3 * (ended - prompted) / steps,
            "tokens": torch.cat(tokens, 1)[0].tolist(),
        }

    def _trials(self, ids: torch.Tensor, tokens: int) -> tuple[dict[tuple[str, str], float], list[str]]:
        best: dict[tuple[str, str], float] = {}
        failures = []
        for way in self.ways:
            try:
                runs = [self.run(ids, tokens, way) for _ in range(2)]
                best[way] = runs[1]["seconds" if tokens == 1 else "step_ms"]
            except FAILURES as error:
                failures.append(f"{'/'.join(way)}: {_short(error)}")
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        return best, failures

    def _cache(self, kind: str, length: int) -> Any:
        if kind == "static":
            return transformers.StaticCache(config=self._model.config, max_cache_len=length)
        return transformers.DynamicCache(config=self._model.config)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @property
    def _vocab_size(self) -> int:
        return int(self._model.config.vocab_size)


def load(job: dict[str, Any], device: torch.device) -> Any:
    """The checkpoint, or the configuration with weights like our dummy ones: norms stay as they are made."""
    folder = job["model"]
    dtype = choose_dtype(job["dtype"], json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    if job["load_format"] != "dummy":
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return loaded.to(device).eval()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.uniform_(-DUMMY_RANGE, DUMMY_RANGE)
    return model


def entries(job: dict[str, Any], make: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """One entry a cell; a model that cannot be made is an error in each."""
    cells = [Cell(**cell) for cell in job["cells"]]
    try:
        peer = Peer(make(), device)
    except FAILURES as error:
        return [{"batch": cell.batch, "prompt_len": cell.prompt_len, "error": _short(error)} for cell in cells]
    return [peer.measure(cell, job["repeat"], job["given"]) for cell in cells]


def main() -> None:
    """Read the job, measure, write."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    device = pick_device(job["device"], 0)
    found = entries(job, lambda: load(job, device), device)
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


if __name__ == "__main__":
    main()
