"""The processes of a group as attention uses them: connections, and plans that all have made together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ... import _core
from ._channel import Channel
from ._group import group_of
from ._nccl import Communicator

DEADLINE = 60.0  # seconds, as that of ranks that are threads

# How often a group was opened: each time has keys of its own in the store.
_openings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_ranks_of_groups: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()


class Ranks:
    """The ranks of a group. Functions that take a ProcessGroup or DeviceMesh make one for it and keep it; make it yourself for
    another deadline. All ranks of the group make it together.

    Arguments:
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        deadline: seconds that a rank waits for another in a call. After that the call fails.

    A rank that fails or is late makes the calls of all ranks fail, with a reason that names it. These Ranks are of no more use
    then; a call that names the group itself opens new ones.
    """

    def __init__(self, group: Any = None, *, deadline: float = DEADLINE) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline: got {deadline}; expected seconds above 0; {DEADLINE:g} are usual")
        group = group_of(group)
        store = _get_process_group_store(group)
        if store is None:
            raise ValueError(
                f"group: got one of {dist.get_backend(group)}, which has no store; expected gloo or nccl; start torch.distributed "
                "with one of them"
            )
        self.rank, self.size, self.deadline = group.rank(), group.size(), float(deadline)
        self._group = weakref.ref(group)
        opening = _openings[group] = _openings.get(group, 0) + 1
        self._channel = Channel(dist.PrefixStore(f"fovea/{opening}", store), self.rank, self.size, self.deadline)
        self._transports: dict[torch.device, Any] = {}
        self._communicators: dict[torch.device, Communicator] = {}
        self.plans: dict[Any, Any] = {}
        self._plans_made = 0
        self._channel.difference = self._difference

    def process_group(self) -> Any:
        return self._group()

    def transport(self, device: torch.device) -> Any:
        """What _core.plan_ranks takes for tensors on `device`; all ranks ask for it."""
        self._channel.require_open()
        found = self._transports.get(device)
        if found is None:
            with self.telling():
                found = self._transports[device] = self._open(device)
        return found

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """The integers of every rank; all give as many."""
        return self._channel.gather(numbers)

    @contextlib.contextmanager
    def calling(self, number: int) -> Iterator[None]:
        """Messages inside are those of a plan, which has this number on all ranks."""
        self._channel.call = number
        try:
            yield
        finally:
            self._channel.call = 0

    def next_number(self) -> int:
        """Of a plan that all ranks have made."""
        self._plans_made += 1
        return self._plans_made

    def require_same(self, numbers: dict[str, int]) -> None:
        """ValueError on all ranks where one gives other numbers than the others."""
        every = self.gather(list(numbers.values()))
        for i, name in enumerate(numbers):
            values = [each[i] for each in every]
            if len(set(values)) > 1:
                got = " and ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(f"{name}: got {got}, expected the same on all ranks; pass one value on every rank")

    def check(self) -> None:
        """Raises RuntimeError where a rank failed or was late. On GPUs, where calls return before their work is done, ask once
        the stream is past it and before results count."""
        self._channel.require_open()
        for transport in self._transports.values():
            try:
                _core.check_ranks(transport)
            except RuntimeError as error:
                self.stop(str(error))
                raise RuntimeError(self._channel.failure) from None  # the reason of the rank that gave up first

    def reasons(self) -> list[str]:
        """For each plan that was made: the methods that were weighed, the chosen one first, and what this rank does."""
        return [_core.explain_ranks(planned.plan)[0] for planned in self.plans.values()]

    @property
    def failed(self) -> bool:
        return bool(self._channel.failure)

    def stop(self, reason: str) -> None:
        """This rank gives up: the calls of the others fail."""
        self._channel.stop(f"rank {self.rank}: {reason}")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What fails inside fails on all ranks."""
        try:
            yield
        except Exception as error:
            self.stop(str(error))
            raise

    def close(self) -> None:
        """Ends the connections. All ranks call it."""
        self.plans.clear()
        for device, transport in self._transports.items():
            communicator = self._communicators.pop(device, None)
            try:
                _core.check_ranks(transport)
            except RuntimeError:
                communicator = None  # aborted, and not to be touched
            _core.close_ranks(transport)
            if communicator is not None:
                communicator.destroy()
        self._transports.clear()
        self._channel.close()

    def _difference(self, peer: int, call: int) -> str:
        """How the plan that a peer runs differs from that of this rank; both are kept here, as all ranks made them."""
        keys = {planned.number: key for key, planned in self.plans.items()}
        own, other = keys.get(self._channel.call), keys.get(call)
        if own is None or other is None:
            who = f"rank {self.rank if own is None else peer}"
            return f"{who} makes a plan, as its arguments are new, where others run one that is kept; pass the same on all ranks"
        parts = zip(own.named(), other.named(), strict=True)
        name, mine, theirs = next(((a[0], a[1], b[1]) for a, b in parts if a != b), ("calls", "one", "another"))
        return (
            f"{name}: got {mine} on rank {self.rank} and {theirs} on rank {peer}, expected the same on all ranks; pass one value on "
            "every rank"
        )

    def _open(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return _core.open_ranks(self._channel, self.rank, self.size)
        communicator = self._communicators[device] = Communicator(self._channel, device.index, self.deadline)
        return _core.open_nccl_ranks(communicator.address, device.index, round(1000 * self.deadline))


def ranks_of(group: Any) -> Ranks:
    """Those that a caller made, or those of a group, opened at the first call and after a failure."""
    if isinstance(group, Ranks):
        return group
    group = group_of(group)
    found = _ranks_of_groups.get(group)
    if found is None or found.failed:
        found = _ranks_of_groups[group] = Ranks(group)
    return found
