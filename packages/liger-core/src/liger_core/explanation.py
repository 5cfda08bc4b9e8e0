# SPDX-License-Identifier: Apache-2.0
"""The explanation of a call: the implementation that it would run, and the reason."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from liger_core.errors import OptionError, Unsupported
from liger_core.op import Op
from liger_core.plugins import Registry, registry
from liger_core.private_torch import FakeTensorMode
from liger_core.selection import AUTO, in_words, ranking, selected


@dataclass(frozen=True)
class Explanation:
    """The implementation that a call gets, and the reason; `str()` gives a readable summary."""

    op: str
    backend: str
    reason: str
    candidates: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"\n  {name}: {verdict}" for name, verdict in self.candidates.items())
        return f"{self.op}: {self.backend} ({self.reason}){others}"


def explain(op: Op[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return which implementation the call `op(*args, **kwargs)` would run, and why, without running it.

    Raises what the call itself would raise for wrong arguments, and OptionError for anything but an op.
    """
    if not isinstance(op, Op):
        raise OptionError(f"explain: op must be an op such as liger_core.rms_norm, got {op!r}")
    args, kwargs = op.checked(args, kwargs)
    loaded = registry()
    first = args[0] if args else kwargs[op.first]
    device = first.device.type
    if loaded.ops.get(op.name) is not op:
        return Explanation(op.name, "reference", "no plugin that is loaded offers this op", {})
    name, source = selected(op)
    if op.layout is not None:
        # The choice depends on the local tensors of DTensors.
        args, kwargs = tree_map_only(
            torch.Tensor, lambda value: value.to_local() if hasattr(value, "to_local") else value, (args, kwargs)
        )
    verdicts = {b: _verdict(loaded, op, b, device, args, kwargs) for b in loaded.backends}
    candidates = {b: verdict.words for b, verdict in verdicts.items()} | {
        b: f"not loaded: {why}" for b, why in loaded.left_out.items()
    }
    if name != AUTO:
        ends = "" if verdicts[name].runs is not False else ", so the call raises BackendError"
        return Explanation(
            op.name,
            name,
            f"selected by {source}; {candidates[name]}{ends}{_compiled(loaded, op, name, first)}",
            candidates,
        )
    tried = [*ranking(loaded, op).get(device, []), "reference"]
    declined = [b for b in tried if verdicts[b].runs is False]
    best, *after = (b for b in tried if b not in declined)
    why = "; ".join(f"{b!r} {candidates[b]}" for b in declined) if declined else f"highest priority on {device} tensors"
    if verdicts[best].runs is None:
        why += f"; if it declines, {in_words(after[0])} is tried next"
    return Explanation(op.name, best, f"auto ({source}): {why}{_compiled(loaded, op, best, first)}", candidates)


def _compiled(registry: Registry, op: Op[..., Any], backend: str, first: Any) -> str:
    most = registry.handed_over.get(backend, {}).get(op.name, 0)
    return f"; a compiled region gets the reference up to {most:,} elements" if most and first.numel() <= most else ""


class _Verdict(NamedTuple):
    """The verdict on a backend: whether it would run a call (None if only the call can show it), and the reason."""

    runs: bool | None
    words: str


def _verdict(registry: Registry, op: Op[..., Any], name: str, device: str, args: Any, kwargs: Any) -> _Verdict:
    backend = registry.backends[name]
    if name in registry.unavailable:
        return _Verdict(False, f"unavailable: {registry.unavailable[name]}")
    if op.name not in registry.implementations[name]:
        return _Verdict(False, f"does not implement {op.name}")
    if name == "reference":
        return _Verdict(True, "can run")
    if device not in backend.device_types:
        return _Verdict(False, f"runs on {' and '.join(backend.device_types)} tensors, got a {device} tensor")
    if not (backend.supports_fake_tensors and FakeTensorMode):
        return _Verdict(None, "can run unless it declines, which only the call itself shows")
    return _on_fakes(registry.implementations[name][op.name], args, kwargs)


def _on_fakes(implementation: Callable[..., Any], args: Any, kwargs: Any) -> _Verdict:
    """Call the implementation on fake tensors, which compute nothing; an implementation declines before any work."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), dict(kwargs)))
        # An implementation that fails on fake tensors has not declined.
        with suppress(Exception):
            try:
                implementation(*fake_args, **fake_kwargs)
            except Unsupported as reason:
                return _Verdict(False, f"declines: {reason}")
    return _Verdict(True, "can run")
