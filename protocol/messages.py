"""Typed tables of the processes' messages: supervisors with the coordinator, and the frontend with the head's engine.

Each table is a closed union of tagged structs, msgpack-encoded, with the version as the first element of an envelope. A message
that does not decode strictly is refused whole.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.commands import Depth, Loops

MESSAGES_VERSION = 5

Count = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of every message; the class name is its tag on the wire."""


# Frontend -> engine


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tokens are chosen for one sequence. The frontend has validated it; the seed is always set.

    temperature 0 is greedy. top_k 0 is off. Penalties follow OpenAI (presence, frequency over generated tokens) and CTRL
    (repetition, over prompt and generated tokens). logprobs is the number of alternatives to report, None for no logprobs;
    prompt_logprobs likewise for prompt positions. loops is for looped models; None is one loop.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: bool = False
    loops: Loops | None = None


class VisionInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One image of a prompt, or one group of a video's frames that the encoder takes together, resized and not yet normalised.

    `start` is the position of its first placeholder token in the prompt. `height` and `width` count rows of the prompt: patches
    after merging. `pixels` are `[frames, height * merge * patch, width * merge * patch, 3]` uint8 RGB. `digest` are 32 bytes of
    BLAKE2b over the shape and the pixels: equal digests mean equal embeddings.
    """

    start: Count
    height: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    width: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    frames: Annotated[int, msgspec.Meta(ge=1, le=16)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    pixels: bytes

    @property
    def rows(self) -> int:
        """Placeholder tokens that stand for it."""
        return self.height * self.width


class Submit(Message, frozen=True):
    """One sequence to run. A request with n > 1 is n of these, whose seeds differ; `group` is the HTTP request's id.

    `generated` holds tokens already emitted in an earlier epoch (replay): they are prefilled with the prompt and not emitted again;
    positions count from the prompt's first token, so counter-based sampling continues where it was. `mask` is the grammar's
    first token bitmask (little-endian uint32 words, one bit a token) when `sampling.grammar`. `suspicions` counts the epochs that
    ended without an outside cause while this sequence was in them; from two on it runs alone. `images` are in prompt order.

    `depths` has one entry for each of `generated` when `sampling.loops` are more than one: how many loops the row ran that sampled
    it, 0 for the prompt's last. Otherwise it is empty.
    """

    request_id: str
    group: str
    prompt: list[TokenId]
    sampling: SamplingParams
    priority: int = 0
    generated: list[TokenId] = []
    adapter: int = 0
    mask: bytes = b""
    suspicions: Count = 0
    images: list[VisionInput] = []
    depths: list[Depth] = []


class Abort(Message, frozen=True):
    """The client went away or a stop string was found: end these sequences, answering each with one terminal event."""

    request_ids: list[str]


class Mask(Message, frozen=True):
    """The grammar's bitmask for the token at generated index `index` of a sequence."""

    request_id: str
    index: Count
    mask: bytes


class Takeover(Message, frozen=True):
    """A frontend's first message. Sequences whose id does not begin with `prefix` were an earlier frontend's: all of them end."""

    prefix: str


# Engine -> frontend


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token's, and the best alternatives in descending order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


FinishReason = Literal["stop", "length", "abort", "error"]


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one sequence. `finish` is set in its last update, and in no other.

    `stop_token` is the stop id that ended it, if one did (it is the last of `tokens`). `prompt_logprobs` comes with the chunk that
    computed it: entry i is for prompt position `prompt_start + i` (position 0 has none). `error` explains finish "error".
    `cached` is the number of prompt tokens found in the prefix tree, reported with the first update. `depths` has one entry for
    each of `tokens`, as in Submit, when the sequence may run more than one loop.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    status: int = 200
    retry_after: float | None = None
    prompt_start: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0
    depths: list[int] = []


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges and totals of the head after a step.

    `host_seconds` are those of its loop in this epoch, without waits for the device's results or for something to do.
    """

    step: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    free_slots: int
    total_slots: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    ranks: list[int]
    host_seconds: float = 0.0


class Results(Message, frozen=True):
    """One message a step."""

    epoch: Count
    updates: list[SequenceUpdate]
    stats: EngineStats


class EpochReady(Message, frozen=True):
    """The engine of this epoch accepts requests, and what the frontend must know of its model: limits, vocabulary, inputs.

    `max_loops` is how often a looped model may run its core; 1: it is not looped.
    """

    epoch: Count
    max_model_len: Count
    vocab_size: Count
    max_num_seqs: Count
    stop_token_ids: list[int]
    block_size: Count
    world: Count
    forward_mode: str
    inputs: list[str]
    max_loops: Annotated[int, msgspec.Meta(ge=1)] = 1


class EpochEnded(Message, frozen=True):
    """The engine of this epoch gives no more results; `reason` is for health and logs. Sent by the coordinator.

    `final`: no epoch follows. `suspicious`: nothing from outside ended it, so a sequence that was in it may have. `alone` is the
    request id of the sequence that ran alone at that moment, empty when none did.
    """

    epoch: Count
    reason: str
    final: bool
    suspicious: bool = False
    alone: str = ""


class Recovered(Message, frozen=True):
    """This epoch runs in the place of one that failed. `seconds` by phase: leave, spawn, import, load, rendezvous, total."""

    epoch: Count
    seconds: dict[str, float]


ToEngine = Submit | Abort | Mask | Takeover
ToFrontend = Results | EpochReady | EpochEnded | Recovered


# Supervisors, coordinator and engines


class Join(Message, frozen=True):
    """A supervisor asks to take part. `boot` is a nonce of this supervisor's life; `token` the shared secret."""

    token: str
    host: str
    boot: str
    rank: Count | None
    device: str
    package: str


class Welcome(Message, frozen=True):
    """The coordinator's answer: the rank, the world and the whole RuntimeConfig (as JSON). Supervisors hand it to their engine."""

    rank: Count
    world: Count
    config: bytes


class Refused(Message, frozen=True):
    """The coordinator's other answer to JOIN. `again`: a later try may be answered otherwise."""

    reason: str
    again: bool = False


class Loaded(Message, frozen=True):
    """A rank's engine has its weights and is in no epoch. `seconds` of its start by phase: spawn, import, load."""

    rank: Count
    seconds: dict[str, float] = {}


class OpenEpoch(Message, frozen=True):
    """The head's engine is to open a fresh rendezvous store and a listener for this epoch."""

    epoch: Count
    world: Count


class EpochOpened(Message, frozen=True):
    """The head's answer: where the store and the command links of this epoch listen (`host:port` or `unix:/path`)."""

    epoch: Count
    store: str
    links: str


class BeginEpoch(Message, frozen=True):
    """Every engine connects, shakes hands and forms the communicators of this epoch."""

    epoch: Count
    world: Count
    store: str
    links: str


class Ready(Message, frozen=True):
    """This rank's engine executes commands of this epoch. The head's engine adds what the frontend must know."""

    epoch: Count
    rank: Count


class EndEpoch(Message, frozen=True):
    """The epoch is over; engines leave its communicators. `reason` says what was seen."""

    epoch: Count
    reason: str


class EpochLeft(Message, frozen=True):
    """An engine's one answer to EndEpoch: it holds nothing of that epoch any more, and has its weights still.

    `alone` is the request that ran alone when it left, as in Report: the head may be told of the end before it saw anything itself.
    """

    epoch: Count
    rank: Count
    alone: str = ""


class KillEngine(Message, frozen=True):
    """The supervisor is to kill its engine and start another: it did not leave an epoch in time."""

    reason: str


class Progress(Message, frozen=True):
    """What a rank's progress page says (`protocol.progress`), as its supervisor last read it. `idle_s` is since its last move."""

    rank: Count
    epoch: Count
    step: Count
    command: str
    phase: str
    collectives: Count
    moves: Count
    idle_s: float


class Report(Message, frozen=True):
    """Something went wrong on a rank: evidence, not a decision.

    `fatal`: starting again cannot help. `ended`: its engine process is gone, and its supervisor starts another. `outside`: somebody
    else's act, which no request can have caused. `alone` is the request that ran alone, as `protocol.progress` says.
    """

    rank: Count
    epoch: Count
    error: str
    message: str
    fatal: bool = False
    ended: bool = False
    outside: bool = False
    alone: str = ""


class Stop(Message, frozen=True):
    """Drain for at most `grace` seconds, then end."""

    reason: str
    grace: float


ToCoordinator = Join | Loaded | EpochOpened | Ready | EpochLeft | Progress | Report | Stop
ToSupervisor = Welcome | Refused | OpenEpoch | BeginEpoch | EndEpoch | KillEngine | Stop
ToEngineControl = Welcome | OpenEpoch | BeginEpoch | EndEpoch | Stop
FromEngineControl = Loaded | EpochOpened | Ready | EpochLeft | Report
