"""What the head keeps of each live request beside the scheduler: its prompt, its parameters, its images and its grammar masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from protocol.messages import Mask, SamplingParams, Submit, VisionInput


@dataclass(slots=True)
class Request:
    """One live sequence. `masks` maps a generated index to the grammar's bitmask for that token.

    `images` keep their pixels: whenever the sequence starts anew and their rows are not at hand, they are encoded again.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    images: list[VisionInput] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Pixels:
    """The pixels of an image, and how often live requests show it."""

    data: bytes
    uses: int = 0


class RequestTable:
    """Live requests by id, in order of arrival, and since when each one's next mask is due."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._pixels: dict[bytes, _Pixels] = {}
        self._due: dict[str, float] = {}
        self._constrained = 0
        self._last_mask = float("-inf")

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        """The request, or None when it is over."""
        return self._requests.get(request_id)

    def ids(self) -> list[str]:
        """Every live request."""
        return list(self._requests)

    def add(self, submit: Submit) -> None:
        """A request that the scheduler took. Pixels that another one has are kept once: all samples of a prompt have the same."""
        images = [self._shared(image) for image in submit.images]
        request = Request(submit.request_id, submit.prompt, submit.sampling, images)
        if submit.sampling.grammar:
            request.masks[len(submit.generated)] = submit.mask
            self._constrained += 1
        self._requests[submit.request_id] = request

    def remove(self, request_id: str) -> None:
        """Its terminal event went out. A request refused at submission was never here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for image in request.images:
            self._let_go(image.digest)
        if request.sampling.grammar:
            self._constrained -= 1
            self._due.pop(request_id, None)

    def _shared(self, image: VisionInput) -> VisionInput:
        pixels = self._pixels.setdefault(image.digest, _Pixels(image.pixels))
        pixels.uses += 1
        return msgspec.structs.replace(image, pixels=pixels.data)

    def _let_go(self, digest: bytes) -> None:
        pixels = self._pixels[digest]
        pixels.uses -= 1
        if not pixels.uses:
            del self._pixels[digest]

    # Masks

    def expect_mask(self, request_id: str, now: float) -> None:
        """A token of the request went out: if it has a grammar, its next mask is due from now on."""
        if not self._constrained:
            return
        request = self._requests.get(request_id)
        if request is not None and request.sampling.grammar:
            self._due.pop(request_id, None)
            self._due[request_id] = now

    def set_mask(self, message: Mask, now: float) -> None:
        """Keep a mask that the scheduler took for a live request."""
        self._requests[message.request_id].masks[message.index] = message.mask
        self._due.pop(message.request_id, None)
        self._last_mask = now

    def more_masks_coming(self, after: float) -> bool:
        """True when every live request has a grammar, a mask came `after` this moment, and others are awaited."""
        return self._last_mask > after and bool(self._due) and self._constrained == len(self._requests)

    def take_masks(self, request_ids: Sequence[str], indices: Sequence[int]) -> list[bytes | None]:
        """The masks of one step's tokens; see `take_mask`."""
        if not self._constrained:
            return [None] * len(indices)
        return [self.take_mask(request_id, index) for request_id, index in zip(request_ids, indices, strict=True)]

    def take_mask(self, request_id: str, index: int) -> bytes | None:
        """The mask of one token; None for a request without a grammar, or one that is over.

        Kept until the next index is taken, since a recomputed row is sampled again at the same index.
        """
        request = self._requests.get(request_id)
        if request is None or not request.sampling.grammar:
            return None
        for old in [i for i in request.masks if i < index]:
            del request.masks[old]
        return request.masks[index]

    def late_masks(self, before: float) -> list[str]:
        """Requests whose mask is due since `before` or longer, the longest first."""
        late = []
        for request_id, since in self._due.items():
            if since > before:
                break
            late.append(request_id)
        return late

    def restart_clocks(self, now: float) -> None:
        """Every awaited mask is due from now on: what asks for it had not gone out."""
        self._due = dict.fromkeys(self._due, now)

    def check_integrity(self, live: Collection[str]) -> None:
        """ValueError unless the requests are those that the scheduler has, and what is due belongs to them."""
        if list(self._requests) != list(live):
            raise ValueError(f"the head has requests {list(self._requests)}, the scheduler {list(live)}")
        constrained = [request_id for request_id, request in self._requests.items() if request.sampling.grammar]
        if len(constrained) != self._constrained or not set(self._due).issubset(constrained):
            raise ValueError(f"masks are due for {list(self._due)}; {self._constrained} of {constrained} count as constrained")
        shown = Counter(image.digest for request in self._requests.values() for image in request.images)
        kept = {digest: pixels.uses for digest, pixels in self._pixels.items()}
        if kept != shown:
            raise ValueError(f"pixels of {len(kept)} images are kept with {sum(kept.values())} uses, {shown.total()} are shown")
