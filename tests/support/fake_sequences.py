"""What an engine without a model makes of the frontend's messages: a script's tokens, step by step. No threads, no sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from protocol.commands import Loops
from protocol.loops import several
from protocol.messages import Abort, EngineStats, Mask, Results, SequenceUpdate, Submit, Takeover, ToEngine, TokenLogprobs

Script = Callable[[Submit], list[int]]


@dataclass
class Running:
    """A submitted sequence; `script` are its tokens, the replayed ones included, over and over.

    `scored` is how many prompt positions have told their logprobs, the first of which has none.
    """

    submit: Submit
    script: list[int]
    generated: int
    masks: dict[int, bytes] = field(default_factory=dict)
    scored: int = 1
    begun: bool = False
    over: bool = False


def fake_logprobs(token: int, alternatives: int) -> TokenLogprobs:
    """Deterministic: the token itself at -0.25, then its successors at -1.5, -2.5, ..."""
    ids = [token + offset for offset in range(alternatives)]
    return TokenLogprobs(-0.25, 1, ids, [-0.25 if not offset else -0.5 - offset for offset in range(alternatives)])


def fake_depth(index: int, loops: Loops) -> int:
    """Loops of the row that sampled generated token `index`: 0 for the prompt's, then all, or with exits in turn."""
    if not index:
        return 0
    return 1 + index % loops.most if loops.thresholds else loops.most


class FakeSequences:
    """The sequences of one epoch. `script(submit)` gives the whole output, an end token included if it ends by itself.

    A step gives every sequence up to `tokens` tokens, or `chunk` positions of prompt logprobs before its first token. Whatever is
    submitted ends in exactly one terminal update, which abort and takeover give too; with `unseen` the last tokens come without it.
    """

    def __init__(
        self, epoch: int, script: Script, *, eos: int, tokens: int = 1, chunk: int = 1 << 30, unseen: bool = False
    ) -> None:
        self.epoch = epoch
        self.steps = 0
        self._script = script
        self._eos = eos
        self._tokens = tokens
        self._chunk = chunk
        self._unseen = unseen
        self._running: dict[str, Running] = {}
        self._prefix = ""
        self._refusal: SequenceUpdate | None = None

    def __len__(self) -> int:
        return len(self._running)

    def refuse(self, update: SequenceUpdate) -> None:
        """Answer the next submitted sequence with this terminal update (its id is filled in)."""
        self._refusal = update

    def end(self, update: SequenceUpdate) -> Results:
        """End a running sequence with this terminal update."""
        del self._running[update.request_id]
        return self.results([update])

    def take(self, message: ToEngine) -> Results | None:
        """Take one message; returns what is to be said at once."""
        match message:
            case Submit() if self._refusal is not None:
                update = msgspec.structs.replace(self._refusal, request_id=message.request_id)
                self._refusal = None
                return self.results([update])
            case Submit() if not message.request_id.startswith(self._prefix):
                return self.results([SequenceUpdate(message.request_id, [], finish="abort")])
            case Submit():
                self._submit(message)
            case Mask():
                if message.request_id in self._running:
                    self._running[message.request_id].masks[message.index] = message.mask
            case Abort():
                return self._abort(message.request_ids)
            case Takeover():
                self._prefix = message.prefix
                return self._abort([name for name in self._running if not name.startswith(message.prefix)])
        return None

    @property
    def over(self) -> bool:
        """True when everything was made and, because of `unseen`, nobody knows."""
        return bool(self._running) and all(seq.over for seq in self._running.values())

    def due(self) -> list[str]:
        """Sequences that can go on, in order of arrival: not those that wait for a mask."""
        running = {name: seq for name, seq in self._running.items() if not seq.over}
        return [name for name, seq in running.items() if not seq.submit.sampling.grammar or seq.generated in seq.masks]

    def step(self, names: list[str] | None = None) -> Results:
        """One step of all sequences that are due, or of these."""
        self.steps += 1
        updates = [self._advance(self._running[name]) for name in (self.due() if names is None else names)]
        for update in updates:
            if update.finish is not None:
                del self._running[update.request_id]
        return self.results(updates)

    def results(self, updates: list[SequenceUpdate], step: int | None = None, ranks: list[int] | None = None) -> Results:
        """A report with these updates; of the last step unless told otherwise."""
        step = self.steps if step is None else step
        return Results(self.epoch, updates, self._stats(step, [step] * 2 if ranks is None else ranks))

    def _submit(self, message: Submit) -> None:
        running = Running(message, self._script(message), len(message.generated))
        if message.sampling.grammar:
            running.masks[running.generated] = message.mask
        self._running[message.request_id] = running

    def _abort(self, request_ids: list[str]) -> Results | None:
        gone = [name for name in request_ids if self._running.pop(name, None) is not None]
        return self.results([SequenceUpdate(name, [], finish="abort") for name in gone]) if gone else None

    def _advance(self, sequence: Running) -> SequenceUpdate:
        submit, sampling = sequence.submit, sequence.submit.sampling
        start, prompt_logprobs = self._score(sequence)
        tokens: list[int] = []
        finish, stop_token = None, None
        # Like the real engine: the prompt's last logprobs come with the first token, and a sequence that has one was scored.
        while finish is None and sequence.scored >= len(submit.prompt) and len(tokens) < self._tokens:
            if sampling.grammar and sequence.generated not in sequence.masks:
                break
            token = self._next(sequence)
            tokens.append(token)
            stops = token in sampling.stop_token_ids or (token == self._eos and not sampling.ignore_eos)
            if stops and sequence.generated >= sampling.min_tokens:
                finish, stop_token = "stop", token
            elif sequence.generated >= sampling.max_tokens:
                finish = "length"
        if self._unseen:
            sequence.over, finish, stop_token = finish is not None, None, None
        cached, sequence.begun = 0 if sequence.begun else 3, True
        first, loops = sequence.generated - len(tokens), several(sampling.loops)
        return SequenceUpdate(
            request_id=submit.request_id,
            tokens=tokens,
            logprobs=None if sampling.logprobs is None else [fake_logprobs(token, sampling.logprobs) for token in tokens],
            finish=finish,
            stop_token=stop_token,
            prompt_start=start,
            prompt_logprobs=prompt_logprobs,
            cached=cached,
            depths=[] if loops is None else [fake_depth(first + place, loops) for place in range(len(tokens))],
        )

    def _score(self, sequence: Running) -> tuple[int, list[TokenLogprobs] | None]:
        submit, start = sequence.submit, sequence.scored
        wanted = submit.sampling.prompt_logprobs
        if wanted is None or submit.generated or start >= len(submit.prompt):
            sequence.scored = len(submit.prompt)
            return 0, None
        sequence.scored = min(start + self._chunk, len(submit.prompt))
        return start, [fake_logprobs(token, wanted) for token in submit.prompt[start : sequence.scored]]

    def _next(self, sequence: Running) -> int:
        token = sequence.script[sequence.generated % len(sequence.script)]
        if sequence.submit.sampling.grammar:
            token = self._allowed(token, sequence.masks.pop(sequence.generated))
        sequence.generated += 1
        return token

    def _allowed(self, wanted: int, mask: bytes) -> int:
        """The scripted token if the mask allows it, else the end token, else the lowest allowed."""
        bits = int.from_bytes(mask, "little")
        for token in (wanted, self._eos):
            if bits >> token & 1:
                return token
        assert bits, "the mask allows no token"
        return (bits & -bits).bit_length() - 1

    def _stats(self, step: int, ranks: list[int]) -> EngineStats:
        running = len(self._running)
        return EngineStats(
            step=step,
            running=running,
            waiting=0,
            free_blocks=100,
            total_blocks=128,
            free_slots=8 - min(8, running),
            total_slots=8,
            preemptions=0,
            prompt_tokens=10,
            generated_tokens=step,
            cached_tokens=3,
            ranks=ranks,
            host_seconds=step / 4,
        )
