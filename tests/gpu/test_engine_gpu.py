"""The engine on GPUs: greedy tokens of tiny checkpoints of every family are those of the CPU, on one device and over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import hf_logits, make_checkpoint, prompt
from tests.support.greedy import Judged, judge_greedy
from tests.support.ranks import RankPool
from tests.support.waves import SIZES, waves_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GENERATE = "tests.distributed.engine_cases:generate"
LENGTHS = (1, 2, 63, 64, 65, 200)
NEW_TOKENS = 12
FAMILIES = [
    ("mixtral", "plain"),
    ("mixtral", "window"),
    ("qwen3", "plain"),
    ("llama", "llama3"),
    ("qwen3_moe", "yarn"),
    ("qwen3_moe", "fused"),
    ("qwen3_next", "plain"),
    ("qwen3_next", "mixed"),
    ("qwen3_5", "plain"),
    ("qwen3_5_moe", "fused"),
]
BY_HEADS = ("llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda family, variant: make_checkpoint(family, variant, root / f"{family}-{variant}")


@pytest.fixture(scope="session")
def run(ranks: RankPool) -> Run:
    """`run(folder, device, world, dtype, layout)`: answers to mixed requests in odd chunks. CPU answers are made once."""

    def requests() -> list[dict[str, Any]]:
        kind = {"max_tokens": NEW_TOKENS, "prompt_logprobs": 0}
        return [{"prompt": prompt(length, seed=place), **kind} for place, length in enumerate(LENGTHS)]

    @cache
    def answers(folder: Path, device: str, world: int, dtype: str, layout: str = "replicated") -> list[dict[str, Any]]:
        sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 47, "max_model_len": 256}
        where = {"folder": str(folder), "device": device, "dtype": dtype, "attention_layout": layout}
        result = ranks.run(world, GENERATE, requests=requests(), together=True, deadline=300.0, **where, **sizes)[0]
        for answer in result["answers"]:
            assert (answer["finish"], answer["error"], len(answer["tokens"])) == ("length", None, NEW_TOKENS)
        return result["answers"]

    return answers


@pytest.mark.parametrize(("family", "variant"), FAMILIES)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_devices)])
def test_float32_tokens_are_those_of_the_cpu(
    run: Run, folder_of: Callable[[str, str], Path], family: str, variant: str, world: int
) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    folder = folder_of(family, variant)
    on_gpu, on_cpu = run(folder, "cuda", world, "float32"), run(folder, "cpu", 1, "float32")
    judged = Judged()
    for place, answer in enumerate(on_gpu):
        judge_greedy(folder, prompt(LENGTHS[place], seed=place), answer["tokens"], judged)
    if judged.ties == 0:
        assert [answer["tokens"] for answer in on_gpu] == [answer["tokens"] for answer in on_cpu]
    assert judged.ties <= 1


@two_devices
@pytest.mark.parametrize("family", BY_HEADS)
def test_float32_tokens_of_ranks_that_divide_the_heads(run: Run, folder_of: Callable[[str, str], Path], family: str) -> None:
    """Where the kernels take the sizes, decode steps are graphs, with a sum behind every mixer in them; prompts run eagerly."""
    folder, judged = folder_of(family, "heads"), Judged()
    for place, answer in enumerate(run(folder, "cuda", 2, "float32", "tensor")):
        judge_greedy(folder, prompt(LENGTHS[place], seed=place), answer["tokens"], judged)
    assert judged.ties <= 1


@two_devices
@pytest.mark.parametrize(
    ("family", "variant"), [*((family, "heads") for family in BY_HEADS), ("mixtral", "plain"), ("llama", "bias")]
)
def test_float32_tokens_of_ranks_that_divide_the_sequences(
    run: Run, folder_of: Callable[[str, str], Path], family: str, variant: str
) -> None:
    """Where the kernels take the sizes, rows of the other rank's sequences are idle in its graphs; prompts run without them."""
    folder, judged = folder_of(family, variant), Judged()
    for place, answer in enumerate(run(folder, "cuda", 2, "float32", "data")):
        judge_greedy(folder, prompt(LENGTHS[place], seed=place), answer["tokens"], judged)
    assert judged.ties <= 1


@two_devices
@pytest.mark.parametrize("layout", ["tensor", "data"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_bfloat16_of_ranks_that_divide_heads_or_sequences(
    run: Run, folder_of: Callable[[str, str], Path], family: str, layout: str
) -> None:
    folder = folder_of(family, "heads")
    gpu = errors(folder, run(folder, "cuda", 2, "bfloat16", layout))
    cpu = errors(folder, run(folder, "cpu", 1, "bfloat16"))
    assert gpu.mean() < 2 * cpu.mean()
    assert gpu.median() < 1.5 * cpu.median()


@pytest.mark.parametrize(("family", "variant"), FAMILIES)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_devices)])
def test_bfloat16_is_as_near_to_float32_as_on_the_cpu(
    run: Run, folder_of: Callable[[str, str], Path], family: str, variant: str, world: int
) -> None:
    folder = folder_of(family, variant)
    gpu = errors(folder, run(folder, "cuda", world, "bfloat16"))
    cpu = errors(folder, run(folder, "cpu", 1, "bfloat16"))
    # A row that rounding sends to another expert moves the mean, not the median.
    assert gpu.mean() < 2 * cpu.mean()
    assert gpu.median() < 1.5 * cpu.median()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_devices)])
@pytest.mark.parametrize(("family", "variant"), [("qwen3_moe", "yarn"), ("llama", "llama3")])
def test_sampled_tokens_of_graphs_are_those_of_eager_steps(
    ranks: RankPool, folder_of: Callable[[str, str], Path], family: str, variant: str, world: int
) -> None:
    """In graphs logits stay on their ranks, tied heads' too, but for rows that need more than their best."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5, "logprobs": 2}, {"temperature": 0.0, "logprobs": 0}]
    kinds += [{"temperature": 1.0, "top_p": 0.9, "seed": 7}, {"temperature": 0.0, "frequency_penalty": 1.0}, {"temperature": 0.0}]
    requests = [
        {"prompt": prompt(9 + place, seed=place), "max_tokens": NEW_TOKENS + place} | kind for place, kind in enumerate(kinds)
    ]
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 47, "max_model_len": 256, "device": "cuda", "dtype": "float32"}
    answers = {}
    for mode in ("eager", "graph"):
        where = {"folder": str(folder_of(family, variant)), "forward_mode": mode}
        answers[mode] = ranks.run(world, GENERATE, requests=requests, together=True, deadline=300.0, **where, **sizes)[0]["answers"]
    for eager, graph in zip(answers["eager"], answers["graph"], strict=True):
        assert (graph["error"], graph["tokens"]) == (None, eager["tokens"])
        assert graph["logprobs"] == pytest.approx(eager["logprobs"], abs=1e-4)


def test_a_prompt_in_pieces_is_scored_while_nothing_is_sampled(ranks: RankPool, folder_of: Callable[[str, str], Path]) -> None:
    """No sampled token tells that a step is done whose only results are logprobs of its prompt rows."""
    folder, ids = folder_of("qwen3_moe", "yarn"), prompt(200, seed=5)
    requests = [{"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}]
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 47, "max_model_len": 256}
    result = ranks.run(
        1,
        GENERATE,
        requests=requests * 3,
        together=False,
        folder=str(folder),
        device="cuda",
        dtype="float32",
        deadline=300.0,
        **sizes,
    )[0]
    exact = hf_logits(folder, ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for answer in result["answers"]:
        assert torch.allclose(torch.tensor(answer["prompt_logprobs"]), exact, atol=1e-3)


@pytest.mark.parametrize("digest_interval", [0, 1], ids=["plain", "digests"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_steady_decoding_never_waits_for_the_device(
    ranks: RankPool, folder_of: Callable[[str, str], Path], mode: str, digest_interval: int
) -> None:
    """A digest waits for its own event alone, after all of it has been launched."""
    case = "tests.distributed.engine_cases:decode_without_waiting"
    prompts = [prompt(5), prompt(9, seed=1), prompt(20, seed=2)]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "digest_interval": digest_interval}
    for family, variant in (("qwen3_moe", "yarn"), ("qwen3_next", "heads")):
        folder = str(folder_of(family, variant))
        counts = ranks.run(1, case, folder=folder, prompts=prompts, steps=20, device="cuda", forward_mode=mode, **sizes)[0]
        assert counts == [80] * len(prompts)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, "auto"), pytest.param(2, "auto", marks=two_devices), pytest.param(2, "data", marks=two_devices)],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_digest_compiles_nothing_and_leaves_its_step_in_the_graph(
    ranks: RankPool, folder_of: Callable[[str, str], Path], family: str, world: int, layout: str
) -> None:
    case = "tests.distributed.engine_cases:digest_while_decoding"
    prompts = [prompt(5), prompt(9, seed=1), prompt(20, seed=2)]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    folder = str(folder_of(family, "heads"))
    where = {"folder": folder, "device": "cuda", "forward_mode": "graph", "attention_layout": layout}
    found = ranks.run(world, case, prompts=prompts, steps=10, **where, **sizes)[0]
    assert found == {"compiled": [], "eager": 0, "recorded": ["inputs", "outputs", "routing"]}


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, "auto"), pytest.param(2, "auto", marks=two_devices), pytest.param(2, "data", marks=two_devices)],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_serving_compiles_nothing(
    ranks: RankPool, folder_of: Callable[[str, str], Path], family: str, world: int, layout: str
) -> None:
    case = "tests.distributed.engine_cases:compiled_while_serving"
    where = {"folder": str(folder_of(family, "heads")), "device": "cuda", "forward_mode": "graph", "attention_layout": layout}
    sizes = {**SIZES, "dtype": "bfloat16"}
    assert ranks.run(world, case, waves=waves_of(prompt), deadline=300.0, ahead=True, **where, **sizes) == [[]] * world


def errors(folder: Path, answers: list[dict[str, Any]]) -> torch.Tensor:
    """Absolute differences of the prompts' log-probabilities from transformers' in float32."""
    found = []
    for place, answer in enumerate(answers):
        ids = prompt(LENGTHS[place], seed=place)
        if len(ids) == 1:
            continue
        exact = hf_logits(folder, ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append((torch.tensor(answer["prompt_logprobs"]) - exact).abs())
    return torch.cat(found)
