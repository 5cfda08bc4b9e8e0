# SPDX-License-Identifier: Apache-2.0
"""Gather sharded or offloaded weights, which are on the device only while modules use them."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from liger_train.checkpointing import layers
from liger_train.plan.float8 import Float8
from liger_train.plan.ledger import OTHER, WEIGHTS, Ledger, rounded

# As hooks of DeepSpeed, those of a plan do not keep Liger from deferring logits.
DEEPSPEED = "deepspeed"


class ZeroGathering:
    """Gathers weights as ZeRO stage 3 does (deepspeed/runtime/zero/partitioned_param_coordinator.py).

    The weights of a module are fetched before its forward and backward pass, and released after it, unless they are
    used again soon. Once the order of modules is known, the next weights are prefetched.

    persistent  weights of at most this many elements are always on the device
    live        the maximum number of gathered elements, and the distance within which weights are used again
    prefetch    the maximum number of prefetched elements
    order       the weights of modules in the order of their use, from an earlier step
    """

    def __init__(self, ledger: Ledger, persistent: int, live: int, prefetch: int, order: list[list[Tensor]]) -> None:
        self.ledger, self.persistent, self.live, self.prefetch = ledger, persistent, live, prefetch
        self.known_order = order
        self.order: list[list[Tensor]] = []
        self.gathered: dict[int, tuple[Tensor, int]] = {}
        self.users: defaultdict[int, set[int]] = defaultdict(set)
        self.hooks = ExitStack()

    def register(self, model: nn.Module) -> None:
        for module in model.modules():
            weights: list[Tensor] = [w for w in module.parameters(recurse=False) if w.numel() > self.persistent]
            if weights:
                before, after = partial(self._before, module, weights), partial(self._after, module, weights)
                _call_around(module, before, after, self.hooks)

    def release_all(self) -> None:
        for weight, _ in list(self.gathered.values()):
            self._release(weight)

    def _before(self, module: nn.Module, weights: list[Tensor]) -> None:
        self.order.append(weights)
        for weight in weights:
            self._fetch(weight)
            self.users[id(weight)].add(id(module))
        self._prefetch()

    def _after(self, module: nn.Module, weights: list[Tensor]) -> None:
        soon = self._used_soon()
        for weight in weights:
            self.users[id(weight)].discard(id(module))
            if not self.users[id(weight)] and id(weight) not in soon:
                self._release(weight)

    def _fetch(self, weight: Tensor) -> None:
        if id(weight) not in self.gathered:
            self.gathered[id(weight)] = weight, self.ledger.allocate(rounded(weight.numel() * weight.itemsize), WEIGHTS)

    def _prefetch(self) -> None:
        room = min(self.live - sum(w.numel() for w, _ in self.gathered.values()), self.prefetch)
        fetched = 0
        for weights in self.known_order[len(self.order) :]:
            for weight in weights:
                if fetched >= room:
                    return
                if id(weight) not in self.gathered:
                    self._fetch(weight)
                    fetched += weight.numel()

    def _release(self, weight: Tensor) -> None:
        fetched = self.gathered.pop(id(weight), None)
        if fetched is not None:
            self.ledger.free(fetched[1])

    def _used_soon(self) -> set[int]:
        soon: set[int] = set()
        distance = 0
        for weights in self.known_order[len(self.order) :]:
            if distance >= self.live:
                break
            soon.update(map(id, weights))
            distance += sum(w.numel() for w in weights)
        return soon


class LayerGathering:
    """Gathers a layer before it runs, and prefetches the next one, as FSDP2 does.

    As Accelerate wraps models, an LM head with a weight of its own is gathered from the end of the last layer's forward
    pass to the start of its backward pass, and the embedding for its own passes. Other weights stay gathered. What the
    last gathering of a forward pass received stays until the model's forward ends.

    Each of as many ranks casts its shards of weights that are gathered in float8, one after the other, by way of two
    float32 tensors.
    """

    def __init__(self, ledger: Ledger, ranks: int) -> None:
        self.ledger, self.ranks = ledger, ranks
        self.hooks = ExitStack()
        # By id: the weights of the embedding and of the LM head, with what is gathered and released with them.
        self.ends: dict[int, _Gathered] = {}

    def register(self, model: Any) -> None:
        model_layers = layers(model)
        inside = {id(w) for layer in model_layers for w in layer.parameters()}
        in_float8 = {id(m.weight) for m in model.modules() if isinstance(m, Float8) and m.is_gathered}

        def gathered_bytes(weight: Tensor) -> int:
            return rounded(weight.numel() * (1 if id(weight) in in_float8 else weight.itemsize))

        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        sizes = [sum(map(gathered_bytes, layer.parameters())) for layer in model_layers]
        last_size = sizes[-1]
        if head is not None and head.weight is not embedding.weight:
            last_size = gathered_bytes(head.weight)
            first, last = (
                _Gathered(self.ledger, {WEIGHTS: gathered_bytes(module.weight)}) for module in (embedding, head)
            )
            self.ends = {id(embedding.weight): first, id(head.weight): last}
            inside |= self.ends.keys()
            _call_around(embedding, first.gather, first.release, self.hooks)
            # Not around the head: a fused loss reads its weight after its forward.
            _call_around(model.get_decoder(), last.release, last.gather, self.hooks)
        others = sum(gathered_bytes(w) for w in model.parameters() if id(w) not in inside)
        root, received = _Gathered(self.ledger, {WEIGHTS: others}), _Gathered(self.ledger, {OTHER: last_size})
        self.ends.setdefault(id(embedding.weight), root)
        self.hooks.callback(model.register_forward_pre_hook(_hook(root.gather)).remove)
        self.hooks.callback(model.get_decoder().register_forward_hook(_hook(received.gather)).remove)
        self.hooks.callback(model.register_forward_hook(_hook(received.release)).remove)
        for layer, size in zip(model_layers, sizes, strict=True):
            largest = max((w.numel() for w in layer.parameters() if id(w) in in_float8), default=0)
            # This layer, and the next one, which is prefetched.
            gathered = _Gathered(self.ledger, {WEIGHTS: size, OTHER: size}, rounded(2 * 4 * largest // self.ranks))
            _call_around(layer, gathered.gather, gathered.release, self.hooks)

    @contextmanager
    def reducing(self, weight: Tensor, itemsize: int) -> Iterator[None]:
        """Record the copy from which the ranks reduce the gradient of the embedding or the LM head.

        The gradient and its shard exist beside the copy, the gathered weight does not.
        """
        if id(weight) not in self.ends:
            yield
            return
        self.ends[id(weight)].release()
        copy = self.ledger.allocate(rounded(weight.numel() * itemsize), OTHER)
        yield
        self.ledger.free(copy)

    def release_all(self) -> None:
        """Release what no gradient of an input releases."""
        for gathered in self.ends.values():
            gathered.release()


class _Gathered:
    """Weights that are gathered and released together: bytes of each category, and those that gathering takes."""

    def __init__(self, ledger: Ledger, sizes: dict[str, int], workspace: int = 0) -> None:
        self.ledger, self.sizes, self.workspace = ledger, sizes, workspace
        self.blocks: list[int] = []

    def gather(self) -> None:
        if not self.blocks:
            self.blocks = [self.ledger.allocate(size, category) for category, size in self.sizes.items()]
            self.ledger.allocate_briefly(self.workspace, OTHER)

    def release(self) -> None:
        while self.blocks:
            self.ledger.free(self.blocks.pop())


def _hook(function: Callable[[], None]) -> Callable[..., None]:
    """Return a hook of a module that calls a function."""

    def hook(*_: Any) -> None:
        function()

    hook.__module__ = DEEPSPEED
    return hook


def _call_around(module: nn.Module, before: Callable[[], None], after: Callable[[], None], hooks: ExitStack) -> None:
    """Call `before` and `after` around the forward and the backward pass of a module, until `hooks` is closed."""

    def forward_ends(_: nn.Module, args: Any, output: Any) -> None:
        for values, function in ((output, before), (args, after)):
            tensors = (value for value in tree_iter(values) if isinstance(value, Tensor) and value.requires_grad)
            if (first := next(tensors, None)) is not None:
                first.register_hook(_hook(function))
        after()

    forward_ends.__module__ = DEEPSPEED
    hooks.callback(module.register_forward_pre_hook(_hook(before)).remove)
    hooks.callback(module.register_forward_hook(forward_ends).remove)
