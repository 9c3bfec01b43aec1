"""The `LLM` itself: it loads, drives the head turn by turn while prompts run, and ends the other ranks' loops."""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from ep_runtime.config import RuntimeConfig, localise, resolve
from ep_runtime.engine.epoch import open_head, open_worker
from ep_runtime.engine.head import Head
from ep_runtime.engine.intake import TAKEN_AT_ONCE
from ep_runtime.engine.main import collect_garbage, pick_device
from ep_runtime.engine.port import LocalPort
from ep_runtime.engine.rank import load_rank
from ep_runtime.engine.sampler import Sampler
from ep_runtime.engine.setup import image_encoder, scheduler_limits, warm_buckets
from ep_runtime.frontend.loops import LoopsRefused, choose_loops
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.offline.collector import Collector
from ep_runtime.offline.meeting import meet
from ep_runtime.offline.prompts import Prompt, images_of, is_ids, plain_ids
from ep_runtime.offline.samples import Completion, RequestOutput, SamplingParams
from ep_runtime.scheduler.scheduler import Scheduler
from ep_runtime.supervise.place import read_facts, read_place
from model.parallel import Parallel
from model.spec import ModelSpec
from protocol.messages import Abort, Results, Submit, VisionInput

OFFLINE_TOKENS = 11776
"""Rows of a step on GPUs, where nothing else is said: nobody waits for the next token of a stream here, and more of the expert
kernels' blocks of 128 rows is filled than by 8192: 94, 90 and 88 % of them with Qwen3-30B-A3B, Qwen3.5-35B-A3B and
Qwen3-Next-80B-A3B, not 89, 80 and 63."""


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
        listener, epoch_place, self._store = meet(place, config)
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
        self._collectors: dict[str, Collector] = {}
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
        single = isinstance(prompts, str) or is_ids(prompts)
        batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        chosen = params if params is not None else SamplingParams()
        each = [chosen] * len(batch) if isinstance(chosen, SamplingParams) else list(chosen)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts, but {len(each)} sampling parameters")
        unserved = [number for number, params in enumerate(each) if params.n < 1]
        if unserved:
            raise ValueError(f"prompt {unserved[0]} asks for n = {each[unserved[0]].n} samples")
        self._check_loops(each)
        shown = images_of(images, len(batch), single=single)
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
            ids = plain_ids(prompt)
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
        self._collectors[request_id] = Collector(output, completion, params, self.tokenizer)
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


def _close_at_exit(llm: LLM) -> Callable[[], None]:
    """Have `llm` closed when the script ends without having done so, for the other ranks' sake; without keeping it alive."""
    reference = weakref.ref(llm)

    def close() -> None:
        living = reference()
        if living is not None:
            living.close()

    atexit.register(close)
    return close


def _has_tokenizer(config: RuntimeConfig) -> bool:
    return os.path.isfile(os.path.join(config.tokenizer or config.model, "tokenizer.json"))
