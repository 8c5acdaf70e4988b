"""Messages of bytes between the processes of a group, over connections of gloo that nothing else uses."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Messages = list[tuple[int, Any]]

# Gloo closes the connections of a rank that waited too long, and the reason is in the store a little later.
_TIME_TO_WRITE = 0.2


def _reason(error: BaseException) -> str:
    """Without the place in gloo's sources."""
    return re.sub(r"^\[\S+\] ", "", str(error))


def _tensor(memory: Any) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


class _Message(NamedTuple):
    verb: str
    """What the peer does: "send" or "take"."""
    peer: int
    memory: Tensor
    request: Any
    announced: tuple[int, int] | None
    """Where the memory gets the size of the next message, and the number of the peer's call: what they are here."""


class Channel:
    """Carries messages for the compiled part, and for the Python code around it.

    A rank that fails writes its reason to the store and closes its connections, which ends the waiting of the others: they
    find the reason there. A rank that is silent is an error by the deadline, one whose process ended is one at once.
    """

    def __init__(self, store: Any, rank: int, size: int, deadline: float) -> None:
        """All ranks make it, with a store that is theirs alone."""
        self.rank, self.size, self.failure = rank, size, ""
        self.call = 0
        """What this rank is in: a number that is the same for the same call on all ranks."""
        self.difference: Callable[[int, int], str] = lambda peer, call: ""
        """Says how the call of a peer differs from this rank's."""
        self._store = store
        self._counts: Counter[tuple[str, int]] = Counter()
        self._steps: deque[deque[_Message]] = deque()
        self._gloo: Any = None
        if size == 1:
            return
        try:
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=deadline))
            self._gloo.barrier().wait()  # a rank that fails at once closes no connection that another one still opens
        except RuntimeError as error:
            raise RuntimeError(
                f"group: not all of its {size} ranks opened connections to rank {rank} within {deadline:g} s: {_reason(error)}"
            ) from None

    def start(self, sends: Messages, receives: Messages) -> None:
        """Begins a step: [(peer, writable memory)]; messages between two ranks match in their order."""
        self._start([(peer, _tensor(memory)) for peer, memory in sends], [(peer, _tensor(memory)) for peer, memory in receives])

    def finish(self) -> None:
        """Ends the oldest step: its messages are there, and the memory is the caller's again."""
        step = self._steps.popleft()
        while step:
            message = step.popleft()
            try:
                message.request.wait()
            except Exception as error:
                step.clear()
                verb, peer = message.verb, message.peer
                del message  # before the memory of messages goes back to the caller
                raise self._failed(verb, peer, error) from None
            if message.announced is not None and tuple(message.memory.tolist()) != message.announced:
                step.clear()
                self._stop_different_calls(message.peer, message.memory.tolist(), message.announced)

    def _stop_different_calls(self, peer: int, came: list[int], expected: tuple[int, int]) -> None:
        difference = self.difference(peer, came[1]) if came[1] != expected[1] else ""
        if not difference:
            difference = f"rank {peer} sent {came[0]} bytes where {expected[0]} are expected; make the same calls on all ranks"
        self.stop(f"rank {self.rank}: the ranks make different calls: {difference}")
        raise RuntimeError(self.failure)

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """The integers of every rank; all give as many."""
        own = torch.tensor(numbers, dtype=torch.int64)
        every = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._start([(rank, own.view(torch.uint8)) for rank in others], [(rank, every[rank].view(torch.uint8)) for rank in others])
        self.finish()
        return [x.tolist() for x in every]

    def stop(self, reason: str) -> None:
        """This rank gives up: the calls of the others fail with `reason`, unless one has stopped before."""
        if self.failure:
            return
        self.failure = reason
        try:
            self.failure = self._store.compare_set("stopped", "", reason).decode()
        except Exception:
            pass  # the process that holds the store is gone; the others see closed connections
        self.close()

    def close(self) -> None:
        # In this order: requests that are dropped touch no memory any more.
        self._steps.clear()
        self._gloo = None

    def require_open(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def _start(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        self.require_open()
        if self._gloo is None and self.size > 1:
            raise RuntimeError("group: its connections are closed; expected them open; make new Ranks")
        step: deque[_Message] = deque()
        self._steps.append(step)
        # Sizes and calls go ahead of the messages, so that ranks which mean different ones find out at once.
        for peer, memory in receives:
            self._post(step, "send", peer, torch.empty(2, dtype=torch.int64), (len(memory), self.call))
        for peer, memory in sends:
            self._post(step, "take", peer, torch.tensor((len(memory), self.call)))
        for verb, messages in (("send", receives), ("take", sends)):
            for peer, memory in messages:
                self._post(step, verb, peer, memory)

    def _post(self, step: deque[_Message], verb: str, peer: int, memory: Tensor, announced: tuple[int, int] | None = None) -> None:
        request = self._gloo.recv if verb == "send" else self._gloo.send
        try:
            step.append(_Message(verb, peer, memory, request([memory], peer, self._tag(verb, peer, memory)), announced))
        except Exception as error:
            raise self._failed(verb, peer, error) from None

    def _tag(self, verb: str, peer: int, memory: Tensor) -> int:
        """Of a message's number and size: those of another size never get into this memory."""
        self._counts[verb, peer] += 1
        return (self._counts[verb, peer] % 128) << 24 | memory.nbytes % (1 << 24)

    def _failed(self, verb: str, peer: int, error: Exception) -> RuntimeError:
        if "Timed out" not in str(error):
            time.sleep(_TIME_TO_WRITE)
        self.stop(f"rank {self.rank}: rank {peer} did not {verb} a message: {_reason(error)}")
        return RuntimeError(self.failure)
