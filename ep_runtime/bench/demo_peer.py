"""The peer of the demo benchmark: transformers' MixtralForCausalLM on the same checkpoint, one token at a time.

Run as a process of its own by `ep_runtime.bench demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ep_runtime.bench.steps import SETTLE
from ep_runtime.bench.transformers_cache import cache_argument

EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""transformers' ways to run experts; the fastest of them here is measured."""
TRIAL_TOKENS = 8


def main() -> int:
    """Measure and write the result; status 2, with a reason, where transformers is not installed."""
    parser = argparse.ArgumentParser(prog="python -m ep_runtime.bench.demo_peer", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--experts", choices=EXPERTS, help="how experts run; by default the fastest way is found first")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        import transformers
    except ImportError as error:
        print(f"the demo benchmark compares with transformers, which is not installed (extra 'dev'): {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    model: Any = transformers.MixtralForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    loaded = time.perf_counter() - started
    prompt = json.loads(options.prompt_file.read_text(encoding="utf-8"))
    chosen = options.experts or _fastest(model, prompt)
    model.set_experts_implementation(chosen)
    _generate(model, prompt, TRIAL_TOKENS)
    tokens, times = _generate(model, prompt, options.new_tokens)
    result = {
        "intervals_ms": times[SETTLE:],
        "tokens": tokens,
        "load_seconds": loaded,
        "experts": chosen,
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
    }
    options.out.write_text(json.dumps(result), encoding="utf-8")
    return 0


def _fastest(model: Any, prompt: list[int]) -> str:
    """The way to run experts with the least time of its best step."""
    best = {}
    for name in EXPERTS:
        try:
            model.set_experts_implementation(name)
            best[name] = min(_generate(model, prompt, TRIAL_TOKENS)[1])
        except (NotImplementedError, RuntimeError, ValueError) as error:
            print(f"experts {name} do not run here: {error}", file=sys.stderr)
    print({name: round(value, 2) for name, value in best.items()}, file=sys.stderr)
    return min(best, key=lambda name: best[name])


@torch.inference_mode()
def _generate(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the milliseconds of each step after the prompt's. A bare loop: `generate` adds time of its own."""
    from transformers import DynamicCache

    cache = cache_argument(model, DynamicCache(config=model.config))
    output = model(input_ids=torch.tensor([prompt]), **cache, use_cache=True, logits_to_keep=1)
    token = output.logits[:, -1].argmax(-1, keepdim=True)
    tokens, times = [int(token)], []
    for _ in range(new_tokens - 1):
        start = time.perf_counter()
        output = model(input_ids=token, **cache, use_cache=True)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(token))
        times.append(1e3 * (time.perf_counter() - start))
    return tokens, times


if __name__ == "__main__":
    raise SystemExit(main())
