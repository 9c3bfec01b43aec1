"""What the head keeps of each live request beside the scheduler: its prompt, its parameters and its grammar masks."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import Mask, SamplingParams, Submit


@dataclass(slots=True)
class Request:
    """One live sequence. `masks` maps a generated index to the grammar's bitmask for that token."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    masks: dict[int, bytes] = field(default_factory=dict)


class RequestTable:
    """Live requests by id, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        """The request, or None when it is over."""
        return self._requests.get(request_id)

    def ids(self) -> list[str]:
        """Every live request."""
        return list(self._requests)

    def add(self, submit: Submit) -> None:
        """A request that the scheduler took."""
        request = Request(submit.request_id, submit.prompt, submit.sampling)
        if submit.sampling.grammar:
            request.masks[len(submit.generated)] = submit.mask
        self._requests[submit.request_id] = request

    def remove(self, request_id: str) -> None:
        """Its terminal event went out. A request refused at submission was never here."""
        self._requests.pop(request_id, None)

    def set_mask(self, message: Mask) -> None:
        """Keep a mask; one that arrives after its request ended is of no use to anybody."""
        request = self._requests.get(message.request_id)
        if request is not None:
            request.masks[message.index] = message.mask

    def take_mask(self, request_id: str, index: int) -> bytes | None:
        """The mask of one token. Kept until the next index is taken, since a preempted row is sampled again at the same index."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for old in [i for i in request.masks if i < index]:
            del request.masks[old]
        return request.masks.get(index)

    def missing_masks(self, needed: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of `needed` whose request is live and whose mask is not here yet."""
        return [
            (request_id, index)
            for request_id, index in needed
            if (request := self._requests.get(request_id)) is not None and index not in request.masks
        ]
