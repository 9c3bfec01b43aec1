"""Offline use: a model in this process, for scripts and benchmarks. `from ep_runtime import LLM, SamplingParams`.

Under torchrun every rank runs the same script. Rank 0 drives; on the other ranks the constructor serves rank 0's commands until it
closes its `LLM`, at the latest when its script ends, and then ends the process with status 0: what follows the constructor runs on
rank 0 alone.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

import msgspec
import torch

from ep_runtime.config import RuntimeConfig, localise, resolve
from ep_runtime.engine.comm import connect_store, open_store
from ep_runtime.engine.epoch import EpochPlace, open_head, open_worker
from ep_runtime.engine.head import Head
from ep_runtime.engine.intake import TAKEN_AT_ONCE
from ep_runtime.engine.main import collect_garbage, pick_device
from ep_runtime.engine.port import LocalPort
from ep_runtime.engine.rank import load_rank
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.setup import image_encoder, scheduler_limits, warm_buckets
from ep_runtime.frontend.choice import Choice, ChoiceParts
from ep_runtime.frontend.loops import LoopsRefused, choose_loops
from ep_runtime.frontend.sampling import derive_seed
from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.stops import StopMatcher
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.scheduler.scheduler import Scheduler
from ep_runtime.supervise.place import Place, read_facts, read_place
from model.parallel import Parallel
from model.spec import ModelSpec
from protocol import messages
from protocol.commands import Loops
from protocol.listener import Listener
from protocol.messages import Abort, Results, SequenceUpdate, Submit, TokenLogprobs, VisionInput

Prompt = str | Sequence[int]

OFFLINE_TOKENS = 11776
"""Rows of a step on GPUs, where nothing else is said: nobody waits for the next token of a stream here, and more of the expert
kernels' blocks of 128 rows is filled than by 8192: 94, 90 and 88 % of them with Qwen3-30B-A3B, Qwen3.5-35B-A3B and
Qwen3-Next-80B-A3B, not 89, 80 and 63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to generate. Names and defaults are vLLM's; `seed` None draws one for each prompt.

    `max_loops` and `exit_thresholds` are for looped models, as in requests of the server; None takes the `LLM`'s own settings.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    max_loops: int | None = None
    exit_thresholds: Sequence[float] | None = None

    def for_sample(self, seed: int, index: int, room: int, loops: Loops | None) -> messages.SamplingParams:
        """The engine's parameters for sample `index` of a prompt that leaves `room` tokens; each may run so many `loops`."""
        return messages.SamplingParams(
            seed=derive_seed(seed, index),
            max_tokens=min(self.max_tokens, room),
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop_token_ids=list(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            loops=loops,
        )


@dataclass(kw_only=True, slots=True)
class Completion:
    """One sample. `finish_reason` is "stop", "length" or "error" (then `error` says why).

    Where several loops may run, `token_loops` has those of the row that sampled each of `token_ids`, 0 for the prompt's last.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_loops: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """One prompt and its samples. `prompt_logprobs[i]` is for prompt position i + 1."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0


class LLM:
    """A loaded model: `LLM(folder).generate(prompts, params)`. Keyword arguments are fields of `RuntimeConfig`.

    `warm_seconds` is what the warm-up took on all ranks: connecting, capturing, a rehearsal.
    """

    scheduler_type: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self, model: str, **settings: Any) -> None:
        place = read_place(os.environ)
        # torch is in this process anyway, and knows better than the device nodes what it can use.
        facts = read_facts(place, os.environ).model_copy(update={"gpus": torch.cuda.device_count()})
        config = resolve(RuntimeConfig(model=model, **settings), facts, OFFLINE_TOKENS)
        config = localise(config, model=model, cores=facts.cores, local_world=place.local_world, token=None)
        device = pick_device(config.device, place.local_rank)
        rank = load_rank(config, Parallel(place.rank, place.world), device, local_ranks=place.local_world)
        listener, epoch_place, self._store = _meet(place, config)
        if place.rank != 0:
            epoch, worker, link = open_worker(rank, epoch_place, lambda: False)
            collect_garbage()
            with closing(epoch), closing(link):
                worker.run(epoch.slots)
            sys.exit(0)
        self.config = config
        self.tokenizer = Tokenizer.load(config.tokenizer or config.model) if _has_tokenizer(config) else None
        self._rank = rank
        self._epoch, broadcaster, self._links = open_head(rank, epoch_place, listener, lambda: False)
        if listener is not None:
            listener.close()
        self._ids = itertools.count()
        self._port = LocalPort(self._take)
        limits = scheduler_limits(rank, self._epoch.limits)
        self.max_model_len = limits.max_model_len
        self._most_alive = limits.max_slots + limits.max_queue
        self._scheduler = self.scheduler_type(limits)
        self.head = Head(
            broadcaster=broadcaster,
            scheduler=self._scheduler,
            sampler=Sampler(rank.spec.vocab_size, limits.max_slots, device, limits.eos_token_ids),
            port=self._port,
            epoch=0,
            digest_interval=config.digest_interval,
            check_epoch=broadcaster.check,
            encoder=image_encoder(rank, self._epoch.executor),
        )
        warming = time.perf_counter()
        self.head.warm(warm_buckets(rank), config.warm_timeout)
        self.warm_seconds = time.perf_counter() - warming
        self._collectors: dict[str, _Collector] = {}
        self._closed = self._broken = False
        self._at_exit = _close_at_exit(self)

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes and limits; `spec.vision` is None for a model that takes no images."""
        return self._rank.spec

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        images: Sequence[VisionInput] | Sequence[Sequence[VisionInput]] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts (text or token ids) and return their outputs in order.

        `images` has a list for each prompt, empty for one of text alone, or is the list of the only prompt, given as itself. A
        prompt with images is token ids with a placeholder for each row of each image, and an image says where its rows start:
        `ep_runtime.vision_input` makes one from pixels and `spec.vision` of this `LLM`.

        An exception that cuts it short in the middle, an interrupt among them, leaves an `LLM` that can only be closed: the ranks
        may have been in a command.

        Raises:
            ValueError: a prompt is empty, too long, or text without a tokenizer, or asks for loops that the model has not; the
                message names its place.
            RuntimeError: the `LLM` is closed, or an earlier call was cut short.
        """
        if self._closed or self._broken:
            raise RuntimeError("this LLM is closed" if self._closed else "an earlier call was cut short; make a new LLM")
        single = isinstance(prompts, str) or _is_ids(prompts)
        batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        chosen = params if params is not None else SamplingParams()
        each = [chosen] * len(batch) if isinstance(chosen, SamplingParams) else list(chosen)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts, but {len(each)} sampling parameters")
        unserved = [number for number, params in enumerate(each) if params.n < 1]
        if unserved:
            raise ValueError(f"prompt {unserved[0]} asks for n = {each[unserved[0]].n} samples")
        self._check_loops(each)
        shown = _images_of(images, len(batch), single=single)
        outputs = [self._open(number, prompt) for number, prompt in enumerate(batch)]
        groups = [f"prompt-{next(self._ids)}" for _ in outputs]
        pending = [(number, sample, params) for number, params in enumerate(each) for sample in range(params.n)]
        seeds = [secrets.randbits(63) if p.seed is None else p.seed for p in each]
        pending.reverse()
        try:
            while pending or self._collectors:
                # Before a turn no more than it takes in, so that the first step waits for its own requests alone.
                for _ in range(min(TAKEN_AT_ONCE, len(pending), self._most_alive - len(self._collectors))):
                    number, sample, sampling = pending.pop()
                    self._submit(outputs[number], groups[number], sample, sampling, seeds[number], shown[number])
                self.head.turn(idle_wait_s=0.0)
        except BaseException:
            self._broken = True
            raise
        return outputs

    def close(self) -> None:
        """End the other ranks' loops and give the memory back; idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._collectors.clear()
        with ExitStack() as stack:
            stack.callback(self._rank.loaded.close)
            if self._rank.images is not None:
                stack.callback(self._rank.images.clear)
            stack.callback(self._epoch.close)
            stack.callback(self._links.close)
            if not self._broken:
                self.head.shutdown()

    def _open(self, number: int, prompt: Prompt) -> RequestOutput:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt {number} is text, but {self.config.model} has no tokenizer; give token ids")
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            ids = _plain_ids(prompt)
        if not 0 < len(ids) < self.max_model_len:
            raise ValueError(f"prompt {number} has {len(ids)} tokens; 1 to {self.max_model_len - 1} fit max_model_len")
        return RequestOutput(prompt=prompt if isinstance(prompt, str) else None, prompt_token_ids=ids, outputs=[])

    def _check_loops(self, each: Sequence[SamplingParams]) -> None:
        for number, params in enumerate(each):
            try:
                choose_loops(params, self.config, self.spec.max_loops)
            except LoopsRefused as error:
                raise ValueError(f"prompt {number}: {error}") from None

    def _submit(
        self,
        output: RequestOutput,
        group: str,
        sample: int,
        params: SamplingParams,
        seed: int,
        images: list[VisionInput],
    ) -> None:
        completion = Completion(index=sample)
        output.outputs.append(completion)
        request_id = f"sample-{next(self._ids)}"
        ids = output.prompt_token_ids
        self._collectors[request_id] = _Collector(output, completion, params, self.tokenizer)
        loops = choose_loops(params, self.config, self.spec.max_loops)
        sampling = params.for_sample(seed, sample, self.max_model_len - len(ids), loops)
        self._port.send(Submit(request_id=request_id, group=group, prompt=ids, sampling=sampling, images=images))

    def _take(self, results: Results) -> None:
        for update in results.updates:
            collector = self._collectors.get(update.request_id)
            if collector is None:
                continue
            if collector.take(update):
                del self._collectors[update.request_id]
                if update.finish is None:
                    self._port.send(Abort([update.request_id]))


class _Collector:
    """Gathers one sample's updates; its text goes the way of a served answer, stop strings included."""

    def __init__(self, output: RequestOutput, completion: Completion, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._output = output
        self._completion = completion
        self._choice = None if tokenizer is None else _choice(completion.index, output.prompt_token_ids, params, tokenizer)

    def take(self, update: SequenceUpdate) -> bool:
        """Add an update; True when the sample is over, by its own end or by a stop string."""
        completion = self._completion
        if completion.index == 0:
            self._output.prompt_logprobs += update.prompt_logprobs or []
            self._output.cached_tokens += update.cached
        if self._choice is None:
            return self._take_ids(update)
        delta = self._choice.push(update)
        completion.text += delta.content
        completion.token_ids += delta.token_ids
        completion.token_loops += delta.depths
        completion.logprobs += delta.logprobs
        if delta.finish is None:
            return False
        completion.finish_reason, completion.stop_reason, completion.error = delta.finish, delta.stop_reason, update.error
        return True

    def _take_ids(self, update: SequenceUpdate) -> bool:
        """Without a tokenizer there is no text, and no stop string in it."""
        completion = self._completion
        completion.token_ids += update.tokens
        completion.token_loops += update.depths
        completion.logprobs += update.logprobs or []
        if update.finish is None:
            return False
        completion.finish_reason, completion.stop_reason, completion.error = update.finish, update.stop_token, update.error
        return True


def _choice(index: int, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer) -> Choice:
    """What makes the sample's text of its tokens."""
    parts = ChoiceParts(
        detokenizer=IncrementalDetokenizer(tokenizer, prompt[-8:], params.skip_special_tokens),
        stops=StopMatcher(list(params.stop), params.include_stop_str_in_output),
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
    return Choice(index, parts)


def _close_at_exit(llm: LLM) -> Callable[[], None]:
    """Have `llm` closed when the script ends without having done so, for the other ranks' sake; without keeping it alive."""
    reference = weakref.ref(llm)

    def close() -> None:
        living = reference()
        if living is not None:
            living.close()

    atexit.register(close)
    return close


def _meet(place: Place, config: RuntimeConfig) -> tuple[Listener | None, EpochPlace, object]:
    """Find the other ranks through torchrun's own store: rank 0 opens links and a store and publishes their addresses there."""
    if place.world == 1:
        return None, EpochPlace(epoch=0, world=1, store="", links="", token=""), None
    patience = config.rendezvous_timeout
    meeting = connect_store(f"{place.master_addr}:{place.master_port}", place.world, patience, patience)
    key = f"ep_runtime/{place.attempt}"
    local = place.world == place.local_world
    host = "127.0.0.1" if local else socket.gethostbyname(socket.gethostname())
    if place.rank == 0:
        listener = Listener(f"{host}:0")
        store, address = open_store(host, place.world)
        token = secrets.token_hex(16)
        meeting.set(key, f"{address} {listener.address} {token}")
        return (
            listener,
            EpochPlace(epoch=0, world=place.world, store=address, links=listener.address, token=token, host=host),
            store,
        )
    address, links, token = meeting.get(key).decode().split()
    return None, EpochPlace(epoch=0, world=place.world, store=address, links=links, token=token, host=host), None


def _images_of(
    images: Sequence[VisionInput] | Sequence[Sequence[VisionInput]] | None, prompts: int, *, single: bool
) -> list[list[VisionInput]]:
    """The images of each prompt."""
    if images is None:
        return [[] for _ in range(prompts)]
    if single and all(isinstance(image, VisionInput) for image in images):
        return [list(images)]  # type: ignore[arg-type]
    if len(images) != prompts:
        raise ValueError(f"{prompts} prompts, but {len(images)} lists of images")
    return [list(of_one) for of_one in images]  # type: ignore[arg-type]


def _plain_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt of one's own: the fast way is for plain ints, the other for all that is like one."""
    try:
        return msgspec.convert(prompt, list[int])
    except msgspec.ValidationError:
        return [int(token) for token in prompt]


def _is_ids(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)


def _has_tokenizer(config: RuntimeConfig) -> bool:
    return os.path.isfile(os.path.join(config.tokenizer or config.model, "tokenizer.json"))
