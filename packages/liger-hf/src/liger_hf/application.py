# SPDX-License-Identifier: Apache-2.0
"""Put Liger's ops into a model: find the modules that can be replaced, check, replace and report them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from liger_core import Op, OptionError
from liger_core.errors import nearest
from liger_core.plugins import registry
from liger_core.selection import AUTO, automatic, selected
from liger_core.versions import warn_if_untested
from liger_hf import causal_mask, partial_gradients, recurrent, tiling
from liger_hf.discovery import replaceable_ops, rules
from liger_hf.errors import ModelError
from liger_hf.four_bits import expert_matrices
from liger_hf.patch import EARLIER, Patch
from liger_hf.private_transformers import OFFLOADED, USES_KERNELS
from liger_hf.rebinding import unwrapped
from liger_hf.report import EXCLUDED, LEFT, REPLACED, UNLISTED, Report, Row, pattern
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.experts import adapters
from liger_hf.rules.head import rule as head
from liger_hf.rules.lora import together
from liger_hf.stand_in import device_of
from liger_hf.verification import Decision, decide

Names = Iterable[Op[..., Any] | str] | None
_SHARED: ContextVar[dict[Any, Decision] | None] = ContextVar("_SHARED", default=None)


def apply(
    model: nn.Module, *, only: Names = None, exclude: Names = None, verify: bool = True, mlp_rows: int | None = None
) -> Report:
    """Replace modules of a model by Liger's ops, in place, and return a report, which can undo it.

    only, exclude  ops or their names; by default all that have a rule, except embedding. Excluding rope excludes
                   qk_norm_rope, too
    verify         accept a replacement only if, on small random input on the model's device, its outputs and gradients
                   are as accurate as the module's own; for weights on the meta device, on a GPU if there is one.
                   Without it candidates are compared by their outputs on the CPU only
    mlp_rows       the most rows that gated MLPs compute at once; the backward pass recomputes them. For long sequences

    Only the instances in this model change: no class, no module of Python, no other model, no weight or state_dict. The
    report says why a module is left. A second `apply` skips modules that are already replaced. Apply before
    `torch.compile` and after PEFT has wrapped the model.

    While training, `outputs.logits` is computed when it is read; pass keep_logits=True to the model to get a tensor at
    once.

    Raises ModelError if model is not a module or if only= names nothing that it has, OptionError for unknown ops.
    """
    if mlp_rows is not None and (not isinstance(mlp_rows, int) or mlp_rows < 1):
        raise OptionError(f"liger_hf.apply: mlp_rows must be an integer of at least 1, got {mlp_rows!r}")
    report, patches = survey(model, "liger_hf.apply", only, exclude, verify)
    mlps = [] if mlp_rows is None else tiling.tileable(model, verify)
    if patches and only is None:
        owners = {id(patch.owner) for patch in patches}
        masks = [patch for patch in causal_mask.patches(model) if id(patch.owner) not in owners]
        report.notes.extend([causal_mask.NOTE] if masks and any(p.is_cuda for p in model.parameters()) else [])
        patches.extend(masks)
    if (packing := recurrent.note(model)) is not None:
        report.notes.append(packing)
    summed = list(partial_gradients.patches(model))
    if summed:
        report.notes.append(partial_gradients.NOTE.format(count=len(summed), s="s" * (len(summed) > 1)))
        patches.extend(summed)
    # Installed after all decisions, so an error leaves the model unchanged.
    report.patches = [patch.install() for patch in patches]
    shared = list(together.patches(model, report.patches))
    if shared:
        report.notes.append(together.NOTE.format(count=len(shared), s="s" * (len(shared) > 1)))
        report.patches += [patch.install() for patch in shared]
    report.notes.extend(together.unread_forwards(model))
    report.patches += [patch.install() for patch in adapters.patches(model)]
    if mlp_rows is not None:
        # Around the forwards that were just installed.
        report.patches += [tiling.tiles(mlp, mlp_rows).install() for mlp in mlps]
        report.notes.append(f"{len(mlps)} gated MLPs compute at most {mlp_rows} rows at once.")
    if report.patches:
        report.attach(model)
    return report


@contextmanager
def shared_checks() -> Iterator[None]:
    """Within this context, models of one configuration share the checks of modules of one kind."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def survey(
    model: Any,
    caller: str,
    only: Names = None,
    exclude: Names = None,
    verify: bool = True,
    device: torch.device | None = None,
    verdict: str = REPLACED,
) -> tuple[Report, list[Patch]]:
    """Return the report and the patches of `apply`. Candidates are checked on `device`, by default the weights'."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}")
    # The warning names the caller of `apply` or `inspect`.
    warn_if_untested("liger-hf", stacklevel=3)
    excluded = _names(caller, "exclude", exclude, ())
    wanted = _names(caller, "only", only, replaceable_ops(on_request=False)) - excluded
    report = Report(type(model).__name__, notes=_notes(model))
    matches = [
        (name, module, rule, match)
        for name, module in model.named_modules()
        for rule in rules()
        if not rule.on_request or wanted & {*rule.ops}
        if (match := rule.look(module)) is not None
    ]
    home = device or device_of(model)
    plan = PatchPlan()
    shared = _SHARED.get()
    decisions: dict[Any, Decision] = {} if shared is None else shared
    # Op → the op that fits the modules of its rule; itself if no op does.
    fitting: dict[str, str] = {}
    names: dict[tuple[str, ...], list[str]] = {}
    for name, module, rule, match in matches:
        if match.fallback and id(module) in plan.replaced:
            continue
        decision = _decision(decisions, rule, _on_device(match, device, home), wanted, excluded, verify)
        fits = rule.ops if decision.candidate is None else (decision.candidate.op.name,)
        fitting = dict.fromkeys(rule.ops, fits[0]) | fitting | {op: op for op in fits}
        decision = plan.add(module, _if_wanted(decision, wanted, excluded))
        op, backend, outcome = match.op, "", LEFT
        if decision.candidate is not None:
            replacing = decision.candidate.op
            op, backend, outcome = replacing.name, _backend(replacing, module, device, home), verdict
        kind = type_before_parametrizations(module).__name__
        modules = pattern(name) or "(the model itself)"
        key = (rule.name, modules, kind, op, backend, outcome, decision.reason, decision.details)
        names.setdefault(key, []).append(name)
    if only is not None:
        report.absent = _absent(fitting, wanted)
        if wanted and wanted <= report.absent.keys():
            missing = "; ".join(f"{op}: {report.absent[op]}" for op in sorted(wanted))
            raise ModelError(
                f"{caller}: only= must name something that {report.model} has, it has none of it: {missing}"
            )
    report.rows = list(_rows(names))
    report.notes.extend(head.notes(model, plan.patches))
    reasons = [row.reason for row in report.rows if row.op in wanted]
    if reasons and all(EARLIER in reason for reason in reasons):
        report.notes.append("Nothing was changed: an earlier apply has replaced these modules already.")
    return report, plan.patches


class PatchPlan:
    """The patches of one `apply`, at most one for each attribute of an instance.

    replaced  the identities of the modules with an accepted candidate
    """

    def __init__(self) -> None:
        self.patches: list[Patch] = []
        self.replaced: set[int] = set()
        # (owner, attribute) → the candidate that replaces the attribute, and the index of its patch.
        self._candidates: dict[tuple[int, str], tuple[Candidate, int]] = {}

    def add(self, module: nn.Module, decision: Decision) -> Decision:
        """Add the patches of an accepted candidate, or return a decision that names the candidate in its way."""
        candidate = decision.candidate
        if candidate is None:
            return decision
        patches = candidate.install(module)
        attributes = [(id(patch.owner), patch.attribute) for patch in patches]
        conflict = next((self._candidates[key] for key in attributes if key in self._candidates), None)
        if conflict is None:
            self._candidates |= {key: (candidate, index) for index, key in enumerate(attributes, len(self.patches))}
            self.patches.extend(patches)
        else:
            earlier, index = conflict
            if candidate.op in earlier.covers:
                decision = Decision(candidate, f"within {earlier.op.name}")
            elif candidate.onto is not None and (combined := candidate.onto(self.patches[index])) is not None:
                self.patches[index] = combined
            else:
                return Decision(None, f"what it would replace is already replaced for {earlier.op.name}")
        self.replaced.add(id(module))
        return decision


def _if_wanted(decision: Decision, wanted: set[str], excluded: set[str]) -> Decision:
    if decision.candidate is None:
        return decision
    op, parts = decision.candidate.op.name, {op.name for op in decision.candidate.covers} & excluded
    if op not in wanted:
        return Decision(None, f"{op} fits, but is {EXCLUDED if op in excluded else UNLISTED}")
    return Decision(None, f"it includes {', '.join(parts)}, {EXCLUDED}") if parts else decision


def _rows(names: dict[tuple[str, ...], list[str]]) -> Iterator[Row]:
    """Yield a row for each kind of module and decision; if only some modules of a pattern differ, rows name layers."""
    outcomes = Counter(key[:2] for key in names)
    for (rule, modules, *rest), each in names.items():
        yield Row(modules if outcomes[rule, modules] == 1 else _braced(each), len(each), *rest)


def _braced(names: list[str]) -> str:
    """Return names that differ in numbers as one, such as layers.{0,3}.mlp, with at most eight numbers."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names), strict=True)]
    return ".".join(c[0] if len(c) == 1 else f"{{{','.join(c[:8])}{',…' * (len(c) > 8)}}}" for c in columns)


def _names(caller: str, option: str, ops: Names, otherwise: tuple[str, ...]) -> set[str]:
    if ops is None:
        return set(otherwise)
    if isinstance(ops, (str, Op)):
        raise OptionError(
            f"{caller}: {option} must be an iterable of ops, got {ops!r}; write "
            f"{option}=[{getattr(ops, 'name', ops)!r}]"
        )
    names = [value.name if isinstance(value, Op) else value for value in ops]
    for name in names:
        if name == "cross_entropy":
            raise OptionError(
                f"{caller}: {option} must name ops that are put into models, cross_entropy comes with "
                "linear_cross_entropy"
            )
        if name not in (known := replaceable_ops()):
            raise OptionError(
                f"{caller}: {option} must name ops among {', '.join(known)}, got {name!r}.{nearest(str(name), known)}"
            )
    return set(names)


def _notes(model: nn.Module) -> list[str]:
    """Return a sentence for each earlier change to the model by other libraries that affects the replacements."""
    notes = []
    if any(getattr(module, USES_KERNELS, False) is True for module in model.modules()):
        notes.append(
            "The model was loaded with use_kernels=True: Transformers puts its kernels back at each train() and "
            "eval(), over these replacements."
        )
    untrained = [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if OFFLOADED in module.__dict__
        for weight, value in module.named_parameters(recurse=False)
        if value.is_meta and value.requires_grad
    ]
    if untrained:
        notes.append(
            f"accelerate has offloaded {len(untrained)} weights that require a gradient ({untrained[0]}): they get "
            "none, since its hooks drop them after each use; freeze them, or offload with FSDP2 or DeepSpeed ZeRO-3."
        )
    wide = sum(getattr(m, name).numel() for m in model.modules() for name in expert_matrices(m))
    if wide and any(type(module).__name__ == "Linear4bit" for module in model.modules()):
        notes.append(
            f"{wide:,} weights of experts are not in 4 bits, since bitsandbytes quantizes linear layers only; "
            "liger_hf.quantize_experts(model) quantizes them."
        )
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        forward = unwrapped(kind.forward)
        owner = next(base for base in reversed(kind.__mro__) if unwrapped(vars(base).get("forward")) is forward)
        source = getattr(forward, "__module__", None) or owner.__module__
        if source.partition(".")[0] != owner.__module__.partition(".")[0]:
            notes.append(
                f"{owner.__name__}.forward was replaced on the class by {source}; that stays, also after undo."
            )
    return notes


def _absent(fitting: dict[str, str], wanted: set[str]) -> dict[str, str]:
    """Return the wanted ops that fit no module, each with the op that fits instead, or a sentence of its first rule."""
    return {
        op: f"{fitting[op]} fits instead" if op in fitting else rule.nothing
        for rule in reversed(rules())
        for op in rule.ops
        if op in wanted and fitting.get(op) != op
    }


def _decision(
    decisions: dict[Any, Decision], rule: Rule, match: Found, wanted: set[str], excluded: set[str], verify: bool
) -> Decision:
    """Return the decision for a module. All modules of one kind share one check."""
    if wanted.isdisjoint(rule.ops):
        return Decision(None, UNLISTED if excluded.isdisjoint(rule.ops) else EXCLUDED)
    if match.refusal is not None:
        return Decision(None, match.refusal)
    key = (rule.look, match.kind, match.dtype)
    if key not in decisions:
        decisions[key] = decide(match, verify)
    return decisions[key]


def _on_device(match: Found, device: torch.device | None, home: torch.device) -> Found:
    """Set the device of the check: `device` if given, else that of the module's weights, else that of the model."""
    chosen = device or (home if match.device is None else None)
    return match if chosen is None else replace(match, device=lambda: chosen)


def _backend(op: Op[..., Any], module: nn.Module, device: torch.device | None, home: torch.device) -> str:
    """Return the backend that will run the op on `device`; the default is the device of the module, or the model's."""
    name, _ = selected(op)
    if name != AUTO:
        return name
    parameter = next((p for p in module.parameters() if not p.is_meta), None)
    device = device or (parameter.device if parameter is not None else home)
    return automatic(registry(), op).get(device.type, "reference")
