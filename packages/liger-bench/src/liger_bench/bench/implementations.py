# SPDX-License-Identifier: Apache-2.0
"""The implementations that are measured on a workload: backends of an op, and other libraries."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from liger_bench.peers import Peer
from liger_core.errors import Unsupported
from liger_core.op import Op
from liger_core.selection import use

Arguments = dict[str, Any]
BACKEND, PEER = "backend", "peer"


@dataclass(frozen=True)
class Implementation:
    """An implementation of an op: a backend, called through the op, or a function of another library."""

    name: str
    kind: str
    op: Op[..., Any]
    peer: Peer | None = None

    @property
    def overwrites(self) -> tuple[str, ...]:
        """The arguments that it writes to; "gradients" stands for the upstream gradients."""
        return () if self.peer is None else self.peer.overwrites.get(self.op.name, ())

    @property
    def consumes(self) -> bool:
        """Whether its backward pass can run only once per forward pass."""
        return self.peer is not None and self.peer.consumes

    def selected(self) -> AbstractContextManager[object]:
        """Make the op run this implementation within this context."""
        return use(self.name, only=[self.op]) if self.peer is None else nullcontext()

    def prepared(self) -> Callable[..., Any]:
        """Return the function, prepared for a workload."""
        if self.peer is None:
            return self.op
        function = self.peer.calls[self.op.name]
        return function if self.peer.prepared is None else self.peer.prepared(function)

    def taken(self, arguments: Arguments) -> Arguments:
        """Return the arguments that the function takes, by name.

        Raises Unsupported if it lacks an argument whose value is not the op's default.
        """
        if self.peer is None:
            return arguments
        known = inspect.signature(self.peer.calls[self.op.name]).parameters
        for name, value in arguments.items():
            if name not in known and value is not self.op.signature.parameters[name].default:
                raise Unsupported(f"it has no option {name!r}")
        return {name: value for name, value in arguments.items() if name in known}

    def order(self, arguments: Arguments) -> tuple[list[str], list[str]]:
        """Return the names of the positional and of the keyword arguments, as the op's signature has them."""
        if self.peer is not None:
            return [], list(arguments)
        parameters = self.op.signature.parameters.values()
        # Behind an argument that is left out, the others have their names.
        by_position = [
            p.name for p in takewhile(lambda p: p.kind is not p.KEYWORD_ONLY and p.name in arguments, parameters)
        ]
        return by_position, [name for name in arguments if name not in by_position]


def backend(op: Op[..., Any], name: str) -> Implementation:
    return Implementation(name, BACKEND, op)


def peer(op: Op[..., Any], variant: Peer) -> Implementation:
    return Implementation(variant.name, PEER, op, variant)
