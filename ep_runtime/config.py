"""The one runtime configuration: read once from flags, environment and a YAML file, frozen, sent to every process as JSON.

Names that vLLM also has mean the same here. `None` means "chosen at start": `resolve` is the one place that chooses.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.commands import MOST_LOOPS

DEMO = "demo"
"""Value of `model` that names the built-in demo checkpoint."""

SECRETS = frozenset({"api_key", "token"})
ATTENTION_LAYOUTS = ("replicated", "tensor", "data")
"""Layouts of attention that are served; "auto" is one of them."""
PER_PROCESS = SECRETS | {"model", "tokenizer", "threads", "host", "port", "log_level"}
"""Fields that may differ between the processes of one server: folders lie elsewhere on another host, secrets stay in one place."""

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
HostEntry = Annotated[str, Field(pattern=r"^[A-Za-z0-9.*\[\]:-]+$")]


class RuntimeConfig(BaseModel):
    """Everything that is decided before the first rank starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # What is served
    model: str = Field(DEMO, min_length=1, description="model folder, ORG/NAME on the hub, or 'demo' for the built-in demo model")
    served_model_name: str | None = Field(None, min_length=1, description="model name in the API; None: the model as given")
    tokenizer: str | None = Field(None, min_length=1, description="folder with the tokenizer files; None: the model's")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="weights and activations; auto: the checkpoint's"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is a GPU")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the runtime's own random choices, dummy weights among them")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights made on the device, for benchmarks")

    # Sizes
    max_model_len: Count | None = Field(None, description="longest sequence in tokens; None: what the model allows")
    max_num_seqs: Count | None = Field(None, description="sequences that run at once; None: 256 on GPU, 16 on CPU")
    max_num_batched_tokens: Count | None = Field(
        None, description="token budget of one step; None: 8192 on GPU (11776 offline), 512 on CPU"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in one block of key/value cache")
    num_blocks: Count | None = Field(None, description="blocks of key/value cache on each rank; None: derived from memory")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of device memory that the runtime may take")
    max_image_tokens: Count | None = Field(
        None,
        description="image tokens of one prompt, and of all prompts that are computed at once; None: max_model_len, at most 16384",
    )
    image_cache_bytes: int | None = Field(
        None, ge=0, description="rows of encoded images that the head keeps; None: 1 GiB on GPU, 256 MiB on CPU"
    )
    max_queue: Count = Field(256, description="sequences that may wait before new ones get 429")
    max_request_bytes: int = Field(4 * 2**20, ge=1024, description="largest HTTP request body in bytes")

    # How it runs
    forward_mode: Literal["reference", "eager", "graph"] | None = Field(
        None, description="how a forward runs; None: graph on GPU, eager on CPU"
    )
    attention_layout: str = Field(
        "auto",
        description="where attention is computed: 'replicated' on every rank, 'tensor' by heads, 'data' by sequences, which gives "
        "room for as many more of them as there are ranks, 'auto' the faster of the first two",
    )
    protocol: int = Field(2, ge=1, le=2, description="version of the command protocol; 1 is the one-sequence dialect")
    enable_prefix_caching: bool = Field(False, description="reuse the blocks of common prompt beginnings")
    threads: Count | None = Field(None, description="compute threads of each rank on the CPU; None: cores / ranks on the host")
    compile_processes: int | None = Field(
        None,
        ge=0,
        description="processes of each rank that compile a GPU's kernels while weights load; 0: none, each kernel is compiled when "
        "first needed; None: by cores and memory, at most 8",
    )
    digest_interval: int = Field(256, ge=0, description="steps between comparisons of all ranks' state; 0: never")

    # HTTP
    host: str = Field("127.0.0.1", min_length=1, description="address that the HTTP server binds")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0: any free one")
    api_key: str | None = Field(None, min_length=1, description="required as a bearer token by every /v1 request")
    cors_origins: tuple[str, ...] = Field((), description="origins that browsers may call from; none by default")
    chat_template: str | None = Field(None, min_length=1, description="file with a chat template that replaces the model's")
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="sampling defaults: auto takes the model's generation_config.json, none OpenAI's"
    )
    max_loops: int = Field(
        1,
        ge=1,
        le=MOST_LOOPS,
        description="most loops that a token runs if its request says nothing; looped models alone take more than 1",
    )
    exit_thresholds: tuple[Probability, ...] = Field(
        (), description="exit scores at which a token stops before max_loops, one for each loop but the last; none: every loop runs"
    )
    tool_call_parser: str | None = Field(
        None, min_length=1, description="format of tool calls: hermes, qwen3_xml, mistral, none; None: by model"
    )
    reasoning_parser: str | None = Field(
        None, min_length=1, description="format of reasoning: auto, qwen3, deepseek, none; None: by model"
    )

    # Images
    image_url_hosts: tuple[HostEntry, ...] = Field(
        (),
        description="hosts that images are fetched from: NAME, *.NAME or * for any, with :PORT or without; none: no URL is fetched",
    )
    image_dir: str | None = Field(None, min_length=1, description="folder below which file:// URLs may lie; None: nowhere")
    max_images: int = Field(16, ge=0, description="images and videos in one request")
    max_image_bytes: int = Field(20 * 2**20, ge=1024, description="largest encoded image or video in bytes")
    max_image_pixels: int = Field(4 * 2**20, ge=1024, description="pixels of an image after resizing, if the model allows more")
    max_image_request_bytes: int = Field(64 * 2**20, ge=1024, description="largest HTTP request body that may have images in it")
    image_memory_bytes: int = Field(2**30, ge=1024, description="decoded images of unfinished requests before new ones get 429")

    # Ranks
    world_size: Count | None = Field(None, description="ranks in all; None: what torchrun says, else 1")
    coordinator_host: str | None = Field(
        None, min_length=1, description="address where ranks of other hosts join; None: none when all ranks are on one host"
    )
    coordinator_port: int | None = Field(None, ge=1, le=65535, description="port where ranks join; None: MASTER_PORT + 1")
    token: str | None = Field(None, min_length=16, description="secret that ranks of other hosts must present")

    # Deadlines
    rendezvous_timeout: Seconds = Field(300, description="seconds until every rank has joined")
    handshake_timeout: Seconds = Field(60, description="seconds for the ranks of an epoch to connect and compare themselves")
    warm_timeout: Seconds = Field(300, description="seconds for warm-up: connecting, capturing steps, rehearsing the largest")
    load_timeout: Seconds = Field(3600, description="seconds for loading weights")
    command_timeout: Seconds = Field(120, description="seconds for every rank to acknowledge a command")
    max_failed_starts: Count = Field(5, description="times in a row that a rank's engine may end before it is ready; then all ends")
    max_recoveries: Count = Field(200, description="failed epochs within an hour; one more and the server ends")
    standby: bool = Field(
        True, description="keep a second engine process of each rank imported and waiting, for a quicker recovery"
    )
    drain_timeout: float = Field(15, ge=0, le=18, description="seconds that running requests get to finish after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe messages that are printed")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = contradictions(self)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def to_json(self) -> bytes:
        """For another process of the same host. `without_secrets` first for one of another host."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Inverse of `to_json`; raises `pydantic.ValidationError`."""
        return cls.model_validate_json(data)

    def digest(self) -> str:
        """What ranks compare in the handshake: a BLAKE2b hash over every field that must be equal on all of them."""
        fields = self.model_dump(mode="json", exclude=set(PER_PROCESS))
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()

    def without_secrets(self) -> Self:
        """A copy that may leave this host."""
        return self.model_copy(update=dict.fromkeys(SECRETS))

    def table(self) -> str:
        """The configuration as printed at start, one `name: value` a line; secrets are shown as set or not."""
        shown: dict[str, Any] = self.model_dump()
        for name in sorted(SECRETS):
            shown[name] = None if shown[name] is None else "(set)"
        return "\n".join(f"  {name}: {value}" for name, value in shown.items())


def contradictions(config: RuntimeConfig) -> list[str]:
    """What cannot hold together, each naming both settings and their values."""
    problems = []
    slots, budget = config.max_num_seqs, config.max_num_batched_tokens
    layouts = (*ATTENTION_LAYOUTS, "auto")
    if config.attention_layout not in layouts:
        problems.append(f"attention_layout {config.attention_layout!r} is not served; {', '.join(map(repr, layouts))} are")
    if config.protocol == 1 and slots not in (None, 1):
        problems.append(f"protocol 1 runs one sequence at a time, but max_num_seqs is {slots}")
    if config.forward_mode == "graph" and config.device == "cpu":
        problems.append("forward_mode graph needs CUDA graphs, but device is cpu")
    if slots is not None and budget is not None and budget < slots:
        problems.append(f"max_num_batched_tokens {budget} is less than max_num_seqs {slots}: a decode step could not hold them all")
    thresholds, loops = len(config.exit_thresholds), config.max_loops
    if thresholds not in (0, loops - 1):
        problems.append(f"exit_thresholds has {thresholds} values, but max_loops {loops} takes {loops - 1}, or none")
    if config.num_blocks is not None and config.max_model_len is not None:
        room = config.num_blocks * config.block_size
        if room < config.max_model_len:
            problems.append(
                f"num_blocks {config.num_blocks} of block_size {config.block_size} hold {room} tokens, "
                f"fewer than max_model_len {config.max_model_len}"
            )
    if config.coordinator_host in ("0.0.0.0", "::"):
        problems.append(f"coordinator_host {config.coordinator_host} is no address that the other hosts could connect to")
    return problems


class Facts(BaseModel):
    """What the machine and the launcher say, read once by `ep_runtime.supervise.place`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int
    cores: int
    world: int = 1
    local_world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500


GPU_TOKENS = 8192
"""Rows of a step on GPUs, where nothing else is said."""


def resolve(config: RuntimeConfig, facts: Facts, gpu_tokens: int = GPU_TOKENS) -> RuntimeConfig:
    """The configuration with every "chosen at start" that does not depend on the model filled in; steps of `gpu_tokens` on GPUs.

    Raises `ValueError` (a `pydantic.ValidationError` is one) when the result contradicts itself. What depends on the model
    (`max_model_len`, `num_blocks`, `max_image_tokens`) is derived from its spec by the engines, alike on every rank; what depends
    on the host is left to `localise`.
    """
    device = config.device if config.device != "auto" else ("cuda" if facts.gpus else "cpu")
    on_gpu = device == "cuda"
    slots = config.max_num_seqs or (1 if config.protocol == 1 else 256 if on_gpu else 16)
    world = config.world_size or facts.world
    if world < facts.world:
        raise ValueError(f"world_size {world} is less than the {facts.world} ranks that the launcher started")
    one_host = world == facts.local_world and config.coordinator_host is None
    chosen: dict[str, Any] = {
        "device": device,
        "served_model_name": config.served_model_name or config.model.rstrip("/"),
        "max_num_seqs": slots,
        "max_num_batched_tokens": config.max_num_batched_tokens or max(slots, gpu_tokens if on_gpu else 512),
        "image_cache_bytes": _image_cache(config.image_cache_bytes, on_gpu),
        "forward_mode": config.forward_mode or ("graph" if on_gpu else "eager"),
        "world_size": world,
        "coordinator_host": None if one_host else config.coordinator_host or facts.master_addr,
        "coordinator_port": None if one_host else config.coordinator_port or facts.master_port + 1,
    }
    if not one_host and config.token is None:
        raise ValueError(f"{_why_others_join(config, facts)}, but no token is set (token_file)")
    return RuntimeConfig.model_validate(config.model_dump() | chosen)


def _why_others_join(config: RuntimeConfig, facts: Facts) -> str:
    """Why ranks come over the network, by what the user has set."""
    if config.coordinator_host is not None:
        return f"coordinator_host {config.coordinator_host} lets ranks of other hosts join"
    if config.world_size is not None and config.world_size > facts.world:
        one = "1 rank was" if facts.world == 1 else f"{facts.world} ranks were"
        return f"world_size is {config.world_size}, but {one} started (torchrun starts several): the others join over the network"
    return f"{facts.world - facts.local_world} of the {facts.world} ranks are on other hosts and join over the network"


def _image_cache(asked: int | None, on_gpu: bool) -> int:
    return asked if asked is not None else 2**30 if on_gpu else 2**28


def localise(config: RuntimeConfig, *, model: str, cores: int, local_world: int, token: str | None) -> RuntimeConfig:
    """The head's configuration as this host's engine gets it: the model's folder here, and this host's share of cores."""
    threads = config.threads or max(1, cores // local_world)
    return config.model_copy(update={"model": model, "threads": threads, "token": token})
