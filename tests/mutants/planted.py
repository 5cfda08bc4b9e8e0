# SPDX-License-Identifier: Apache-2.0
"""The bugs that `nox -s mutants` plants, one entry each."""

from __future__ import annotations

from dataclasses import dataclass

CORE, TRITON, HF = "liger_core", "liger_triton", "liger_hf"


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs once in `file`, by `new`; the `tests` must then fail, with `seen` in what they print.

    interpreted  run the tests with Triton's interpreter
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    seen: str
    interpreted: bool = False


ACCURACY = "tests/conformance/test_accuracy.py"
DEFINITION = "tests/conformance/test_definition.py"
TRACING = "tests/conformance/test_tracing.py"
FAKE = "        outputs = self.allocate(*self.grouped(args))"
SMALL = "float32 and (one_block or odd_width)"
# Rows in tiles of several, rows of one block, and rows that are walked in tiles.
NORMS = "sliced and rms_norm and (one_block or whole_row or wide)"


def kernel(name: str, file: str, old: str, new: str, which: str, seen: str = "test_outputs_and_gradients_are_as_accurate") -> Mutant:
    """A bug in a Triton kernel that the accuracy of the samples `which` must show."""
    return Mutant(name, f"{TRITON}/{file}", old, new, (ACCURACY, "--backend", "triton", "-k", f"accurate and ({which})"), seen, True)


def stride(name: str, file: str, old: str, new: str, which: str) -> Mutant:
    """A Triton kernel, or its launcher, that reads an upstream gradient with other strides than its own."""
    selected = (ACCURACY, "--backend", "triton", "-k", f"strides and {which}")
    return Mutant(f"triton: {name}", f"{TRITON}/{file}", old, new, selected, "test_upstream_gradients_are_read_through_their_strides", True)


def shared_stride(name: str, file: str, old: str, new: str) -> Mutant:
    """The same in the losses' code that every backend shares."""
    selected = (ACCURACY, "--backend", "reference", "-k", "strides and sliced and linear and (none or one_token or entropy)")
    return Mutant(name, f"{CORE}/ops/{file}", old, new, selected, "test_upstream_gradients_are_read_through_their_strides")


def loss(name: str, file: str, old: str, new: str, test: str, seen: str) -> Mutant:
    """A bug in the mathematics that every backend shares, which only independent formulas can show."""
    return Mutant(name, f"{CORE}/ops/{file}", old, new, (test,), seen)


MUTANTS = (
    # The definitions.
    loss(
        "reference gradient 1 % too large",
        "_softmax_loss.py",
        "    d.mul_(factor[:, None])",
        "    d.mul_(1.01 * factor[:, None])",
        "tests/ops/test_cross_entropy.py",
        "test_cross_entropy_equals_the_function_of_pytorch",
    ),
    Mutant(
        "softcap without its derivative",
        f"{CORE}/ops/_softmax_loss.py",
        "        d.mul_(1.0 - (x / options.softcap).square())",
        "        pass",
        (DEFINITION, "-k", "derivative and softcap"),
        "test_gradients_are_the_derivative_of_the_outputs",
    ),
    loss(
        "ignored targets count in the loss",
        "_softmax_loss.py",
        "    return torch.where(counted, loss, 0.0)",
        "    return torch.where(counted, loss, log_sum)",
        "tests/ops/test_cross_entropy.py",
        "test_cross_entropy_equals_the_function_of_pytorch",
    ),
    loss(
        "z-loss gradient without its factor 2",
        "_softmax_loss.py",
        "share + 2.0 * options.z_loss * (top",
        "share + options.z_loss * (top",
        "tests/ops/test_cross_entropy.py",
        "test_softcap_and_z_loss_are_their_formulas",
    ),
    loss(
        "mean over all tokens, ignored ones too",
        "_softmax_loss.py",
        "    counted = target != ignore_index\n    if class_weight is None:",
        "    counted = target == target\n    if class_weight is None:",
        "tests/ops/test_linear_cross_entropy.py",
        "test_linear_cross_entropy_equals_the_two_functions_of_pytorch",
    ),
    loss(
        "dW summed in bfloat16 across chunks",
        "_chunked_loss.py",
        "    wide = accumulate_dtype or accumulator(dtype)",
        "    wide = accumulate_dtype or dtype",
        "tests/ops/test_linear_cross_entropy.py",
        "test_weight_gradients_of_many_chunks_are_as_accurate_as_of_one",
    ),
    loss(
        "gradient buffer for a frozen weight",
        "_chunked_loss.py",
        "dtype=chunks.chunking(hidden, weight, needs[1]).dtype, device=device) if needs[1] else None",
        "dtype=chunks.chunking(hidden, weight, needs[1]).dtype, device=device)",
        "tests/ops/test_linear_cross_entropy_memory.py",
        "test_a_frozen_weight_gets_no_gradient_buffer",
    ),
    loss(
        "upstream gradient forgotten",
        "_chunked_loss.py",
        "        factor = grad_loss if scale is None else grad_loss * scale",
        "        factor = torch.ones_like(grad_loss) if scale is None else scale",
        "tests/ops/test_linear_cross_entropy.py",
        "test_linear_cross_entropy_equals_the_two_functions_of_pytorch",
    ),
    loss(
        "entropy gradient without the entropy itself",
        "_softmax_loss.py",
        "    return -log_p.exp() * (log_p + entropy[:, None])",
        "    return -log_p.exp() * log_p",
        "tests/ops/test_linear_log_prob.py",
        "test_linear_log_prob_is_gathered_from_the_log_softmax",
    ),
    loss(
        "temperature forgotten in the softcap",
        "linear_log_prob.py",
        "None if softcap is None else softcap / temperature",
        "softcap",
        "tests/ops/test_linear_log_prob.py",
        "test_the_temperature_divides_what_scale_and_softcap_left",
    ),
    Mutant(
        "second backward scales what the first one scaled",
        f"{CORE}/ops/_chunked_loss.py",
        "                self.passes.scaled(summed, factor, grad)",
        "                self.passes.scaled(summed, factor, summed)\n                grad.copy_(summed)",
        (ACCURACY, "-k", "second_backward and linear"),
        "test_a_second_backward_gives_the_same_gradients",
    ),
    Mutant(
        "sums handed out although the graph is kept",
        f"{CORE}/kernels.py",
        "torch._C._current_graph_task_id() != -1 and not _keeps_graph()",
        "torch._C._current_graph_task_id() != -1",
        (ACCURACY, "-k", "second_backward and linear"),
        "test_a_second_backward_gives_the_same_gradients",
    ),
    Mutant(
        "logits overwritten by their gradient",
        f"{CORE}/ops/cross_entropy.py",
        "passes.gradients(logits, target, statistics, grad_loss, options, grad_logits)",
        "passes.gradients(logits, target, statistics, grad_loss, options, logits)\n            grad_logits.copy_(logits)",
        (ACCURACY, "-k", "overwritten and cross_entropy"),
        "test_inputs_are_not_overwritten",
    ),
    Mutant(
        "normaliser read on the host",
        f"{CORE}/ops/_softmax_loss.py",
        "    return torch.where(count == 0, 1.0, count)",
        "    return count if count.item() else torch.ones_like(count)",
        (TRACING, "-k", "compiling and cross_entropy"),
        "test_compiling_breaks_no_graph",
    ),
    Mutant(
        "rms_norm mean without eps",
        f"{CORE}/ops/rms_norm.py",
        "row.square().mean(-1, keepdim=True) + eps",
        "row.square().mean(-1, keepdim=True)",
        ("tests/ops/test_rms_norm.py",),
        "test_a_row_of_zeros_stays_zero",
    ),
    Mutant(
        "rope turns the other way",
        f"{CORE}/ops/rope.py",
        "turned = torch.cat((-part[..., rotary // 2 :], part[..., : rotary // 2]), dim=-1)",
        "turned = torch.cat((part[..., rotary // 2 :], -part[..., : rotary // 2]), dim=-1)",
        ("tests/ops/test_rope.py",),
        "test_rope_is_the_formula_of_transformers",
    ),
    # Custom ops, errors and selection.
    Mutant(
        "fake outputs of another shape",
        f"{CORE}/kernels.py",
        FAKE,
        f"{FAKE}\n        outputs = tuple(o if o is None else o.unsqueeze(0) for o in outputs)",
        (TRACING, "-k", "opcheck and cross_entropy"),
        "test_every_custom_op_that_a_sample_reaches_passes_opcheck",
    ),
    Mutant(
        "a shared gradient reaches one input only",
        f"{CORE}/kernels.py",
        "answer[first] = answer[last] = result",
        "answer[first] = result",
        (ACCURACY, "--backend", "triton", "-k", f"accurate and add_rms_norm and {SMALL}"),
        "test_outputs_and_gradients_are_as_accurate",
        interpreted=True,
    ),
    Mutant(
        "fake outputs of another dtype",
        f"{CORE}/kernels.py",
        FAKE,
        f"{FAKE}\n        outputs = tuple(o if o is None else o.half() for o in outputs)",
        (TRACING, "-k", "fake_tensors and cross_entropy"),
        "test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones",
    ),
    Mutant(
        "reworded error",
        f"{CORE}/checks.py",
        "must have shape ({width},) to match {of}",
        "should have shape ({width},) to match {of}",
        (DEFINITION, "-k", "wrong_call"),
        "test_a_wrong_call_raises_its_sentence",
    ),
    Mutant(
        "check forgotten",
        f"{CORE}/ops/rope.py",
        '    checks.same_dtype("rope", "q", q, k=k)\n',
        "",
        (DEFINITION, "-k", "wrong_call and rope"),
        "test_a_wrong_call_raises_its_sentence",
    ),
    Mutant(
        "named backend falls back silently",
        f"{CORE}/selection.py",
        "_refuse(op, name, source),\n",
        "lambda reason, *args, **kwargs: op.reference(*args, **kwargs),\n",
        ("tests/test_selection.py", "-k", "declined"),
        "test_a_declined_call_is_an_error_under_a_named_backend",
    ),
    Mutant(
        "declined call skips the next backend",
        f"{CORE}/selection.py",
        "in steps.get(first.device.type, ()):",
        "in steps.get(first.device.type, ())[-1:]:",
        ("tests/test_selection.py", "-k", "declined"),
        "test_a_declined_call_goes_to_the_next_backend",
    ),
    Mutant(
        "fake tensors reach a backend that does not support them",
        f"{CORE}/explanation.py",
        "if not backend.supports_fake_tensors:",
        "if backend is None:",
        ("tests/test_selection.py", "-k", "fake_tensor"),
        "test_no_fake_tensor_reaches_a_backend_that_does_not_support_them",
    ),
    Mutant(
        "a sibling task selects inside a block",
        f"{CORE}/selection.py",
        "_inside.get() is not _blocks[-1]:",
        "_inside.get() is None:",
        ("tests/test_selection.py", "-k", "task"),
        "test_tasks_within_a_block_must_not_overlap_either",
    ),
    Mutant(
        "broken plugin disappears silently",
        f"{CORE}/plugins.py",
        "        warnings.warn(",
        "        (lambda *args, **options: None)(",
        ("tests/test_plugins.py", "-k", "fails_to_import"),
        "test_a_plugin_that_fails_to_import_is_reported",
    ),
    Mutant(
        "the plugin loaded last is blamed alone",
        f"{CORE}/plugins.py",
        "with blaming(found, list(dict.fromkeys(rivals)), ",
        "with blaming(found, rivals[-1:], ",
        ("tests/test_plugins.py", "-k", "blamed"),
        "test_of_two_backends_of_one_name_neither_is_loaded_and_both_are_blamed",
    ),
    Mutant(
        "compiler imported with core",
        f"{CORE}/op.py",
        "import torch\n",
        "import torch\nimport torch._dynamo\n",
        ("tests/test_architecture.py", "-k", "loads_no_compiler"),
        "test_importing_core_loads_no_compiler",
    ),
    # Models.
    Mutant(
        "residual: sum and normed rows take each other's names",
        f"{HF}/rules/residual/source.py",
        "(step.result, holders[0])",
        "(holders[0], step.result)",
        ("tests/hf/test_residual.py", "-k", "meaning and OfItsOwn"),
        "test_a_forward_keeps_its_meaning",
    ),
    Mutant(
        "residual: a norm is passed over in spite of its hooks",
        f"{HF}/rules/residual/rule.py",
        "    if _hooked(child) or global_hooks._has_any_global_hook():",
        "    if global_hooks._has_any_global_hook():",
        ("tests/hf/test_residual.py", "-k", "hooks_on_the_norm"),
        "test_hooks_on_the_norm_see_what_they_saw",
    ),
    Mutant(
        "residual: a source is believed that is not that of the code",
        f"{HF}/rules/residual/source.py",
        "return definition if _alike(_compiled(function, definition, ()), function.__code__) else None",
        "return definition",
        ("tests/hf/test_residual.py", "-k", "not_believed"),
        "test_a_source_that_is_not_that_of_the_code_is_not_believed",
    ),
    Mutant(
        "lazy logits: what was read without gradients is kept for good",
        f"{HF}/rules/head/lazy_logits.py",
        "if not self.constant and not torch.is_grad_enabled():",
        "if self.constant and not torch.is_grad_enabled():",
        ("tests/hf/test_logits_gradients.py", "-k", "accuracy_without_gradients and llama-tied"),
        "test_a_look_at_the_logits_takes_no_gradient_from_a_later_loss",
    ),
    Mutant(
        "lazy logits: a cast without gradients has one",
        f"{HF}/rules/head/lazy_logits.py",
        "constant = self.constant or not (same or torch.is_grad_enabled())",
        "constant = self.constant",
        ("tests/hf/test_logits_gradients.py", "-k", "derived and llama-tied"),
        "test_what_is_derived_without_gradients_is_a_constant",
    ),
    Mutant(
        "lazy logits: a step of a fused optimizer goes unnoticed",
        f"{HF}/rules/head/weights.py",
        "call.stepped = call.stepped or any(",
        "call.stepped = call.stepped and any(",
        ("tests/hf/test_logits_weights.py", "-k", "any_optimizer and fused"),
        "test_logits_cannot_be_read_after_a_step_of_any_optimizer",
    ),
    Mutant(
        "lazy logits: the head's own weights instead of those of functional_call",
        f"{HF}/rules/head/projection.py",
        "torch.compiler.is_compiling() or weights.are_in(head):",
        "torch.compiler.is_compiling() or weights.tensors:",
        ("tests/hf/test_logits_weights.py", "-k", "functional_call_uses and untied"),
        "test_functional_call_uses_the_given_weights_for_loss_and_logits",
    ),
    Mutant(
        "lazy logits: threads share which head is lazy",
        f"{HF}/rules/head/projection.py",
        "class Lazy(threading.local):",
        "class Lazy:",
        ("tests/hf/test_logits_weights.py", "-k", "two_threads"),
        "test_training_and_evaluation_in_two_threads_leave_nothing_behind",
    ),
    Mutant(
        "gated unit: gate and up are written over although somebody reads them",
        f"{HF}/rules/gated_unit/ownership.py",
        "if _holders(tensor) not in known:",
        "if not known:",
        ("tests/hf/test_ownership.py", "-k", "written_over"),
        "test_gradients_are_right_and_gate_and_up_are_written_over_only_where_nobody_reads_them",
    ),
    Mutant(
        "gated unit: an activation is passed over in spite of its hooks",
        f"{HF}/passing.py",
        "is not known or hooked(known) or",
        "is not known or",
        ("tests/hf/test_hooks.py", "-k", "sees_what_it_does and forward-activation"),
        "test_a_hook_sees_what_it_does_in_the_plain_model",
    ),
    Mutant(
        "head: backward hooks never run",
        f"{HF}/rules/head/rule.py",
        "if head._backward_hooks or head._backward_pre_hooks or",
        "if",
        ("tests/hf/test_hooks.py", "-k", "sees_what_it_does and backward-head"),
        "test_a_hook_sees_what_it_does_in_the_plain_model",
    ),
    Mutant(
        "check: nothing longer than a few tokens",
        f"{HF}/stand_in.py",
        "LENGTHS = (1, 300)",
        "LENGTHS = (1, 30)",
        ("tests/hf/test_verification.py", "-k", "another_length or another_number"),
        "beyond_32",
    ),
    Mutant(
        "a rule of a plugin that fails takes apply with it",
        f"{HF}/discovery.py",
        "replace(rule, look=_guarded(found, plugin, rule))",
        "rule",
        ("tests/hf/test_rules.py", "-k", "fails_leaves"),
        "test_a_rule_of_a_plugin_that_fails_leaves_the_others_alone",
    ),
    Mutant(
        "squared ReLU: every module without weights is one",
        f"{HF}/rules/activation/rule.py",
        "return torch.equal(forward(replica(module), x.clone()), x.clamp(min=0).square())",
        "return forward(replica(module), x.clone()) is not None",
        ("tests/hf/test_rules.py", "-k", "no_business_of_squared"),
        "test_an_activation_of_another_kind_is_no_business_of_squared_relus",
    ),
    # The Triton backend.
    Mutant(
        "triton: drifted default",
        f"{TRITON}/rms_norm.py",
        "eps: float = 1e-6, *, weight_offset",
        "eps: float = 1e-5, *, weight_offset",
        (DEFINITION, "-k", "signature"),
        "the default of eps must be 1e-06, got 1e-05",
        interpreted=True,
    ),
    kernel(
        "triton: norm gradient 1 % too large",
        "_norm.py",
        "result = (grad - value * (tl.sum(grad * value, 1) / width)[:, None]) * scale",
        "result = (1.01 * grad - value * (tl.sum(grad * value, 1) / width)[:, None]) * scale",
        f"rms_norm and {SMALL}",
    ),
    kernel(
        "triton: mean of the gradient forgotten in long rows",
        "_norm.py",
        " - total / width",
        "",
        "layer_norm and float32 and whole_row",
    ),
    kernel(
        "triton: columns of few rows added without their scale",
        "_norm_sum.py",
        "grad * value * tl.load(inverse + row, mask=row_mask, other=0.0)[:, None]",
        "grad * value",
        f"rms_norm and {SMALL}",
    ),
    kernel(
        "triton: gradient of the sum dropped",
        "_norm.py",
        "                result += tl.load(grad_summed",
        "                tl.load(grad_summed",
        f"add_rms_norm and {SMALL}",
    ),
    Mutant(
        "triton: the sum is normalised before it is rounded",
        f"{TRITON}/_norm.py",
        "        value = rounded.to(tl.float32)",
        "        pass",
        ("tests/ops/test_add_rms_norm.py", "--backend", "triton"),
        "test_what_is_normalised_is_the_rounded_sum",
        interpreted=True,
    ),
    kernel(
        "triton: tail mask dropped from the variance",
        "_norm.py",
        "            value = tl.where(mask, value, 0.0)",
        "            value = value",
        "layer_norm and float32 and odd_width",
    ),
    kernel(
        "triton: merged tiles forget how far their means lie apart",
        "_norm_wide.py",
        "step * step * (share * seen)",
        "0.0",
        "layer_norm and float32 and whole_tiles",
    ),
    kernel(
        "triton: empty batch leaves the weight gradient unwritten",
        "_norm.py",
        "                grad.zero_()",
        "                pass",
        "norm and float32 and empty",
    ),
    kernel(
        "triton: second derivative term of SiLU missing",
        "_gated.py",
        "slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))",
        "slope = sigmoid",
        f"swiglu and {SMALL}",
    ),
    kernel(
        "triton: tail of a row not written",
        "_gated.py",
        "mask = column < width\n    value, _",
        "mask = column < width - 1\n    value, _",
        f"swiglu and {SMALL}",
    ),
    kernel(
        "triton: squared ReLU lets gradients of negative numbers pass",
        "relu_squared.py",
        "tl.where(value <= 0.0, 0.0, 2.0 * value * grad)",
        "2.0 * value * grad",
        f"relu_squared and {SMALL}",
    ),
    kernel(
        "triton: rope backward turns forward",
        "rope.py",
        "        upper = sin2\n        lower = -sin1",
        "        upper = -sin1\n        lower = sin2",
        "rope and float32",
    ),
    kernel(
        "triton: softcap without its derivative",
        "_softmax_loss.py",
        "        d = d * (1.0 - u * u)",
        "        d = d * 1.0",
        "cross_entropy and float32 and softcap",
    ),
    kernel(
        "triton: entropy gradient without the logit scale",
        "_softmax_loss.py",
        "tl.load(entropy_factor + row) * logit_scale",
        "tl.load(entropy_factor + row)",
        "linear_log_prob and float32 and entropy",
    ),
    kernel(
        "triton: one rounding in the middle",
        "_gated.py",
        "(grad * factor * slope)",
        "((grad * factor).to(tl.bfloat16).to(tl.float32) * slope)",
        f"swiglu and {SMALL}",
    ),
    kernel(
        "triton: masked lanes count in the log-sum-exp",
        "_softmax_loss.py",
        'mask=mask, other=float("-inf"), eviction_policy',
        "mask=mask, other=0.0, eviction_policy",
        "float32 and cross_entropy and odd",
    ),
    # Upstream gradients that are not dense.
    stride(
        "grad_y of the norms read as if dense",
        "_norm.py",
        "    grad_y, grad_stride = strided_rows(grad_y)\n",
        "    grad_stride = width\n",
        NORMS,
    ),
    stride(
        "grad_y read as if dense where programs take several rows",
        "_norm.py",
        "tl.load(grad_y + row[:, None] * grad_stride",
        "tl.load(grad_y + row[:, None] * width",
        NORMS,
    ),
    stride(
        "grad_y read as if dense where programs take one row",
        "_norm.py",
        "read(grad_y + row * grad_stride",
        "read(grad_y + row * width",
        NORMS,
    ),
    stride(
        "grad_y of wide rows read as if dense",
        "_norm_wide.py",
        "grad_x, grad_stride, summed_stride, x_stride, width, offset,\n            BLOCK",
        "grad_x, width, summed_stride, x_stride, width, offset,\n            BLOCK",
        NORMS,
    ),
    stride(
        "columns of wide rows added as if grad_y were dense",
        "_norm_wide.py",
        "part, grad_stride, x_stride, rows, width,\n        ROWS",
        "part, width, x_stride, rows, width,\n        ROWS",
        NORMS,
    ),
    stride(
        "columns of few rows added as if grad_y were dense",
        "_norm_sum.py",
        "tl.load(grad_y + row[:, None] * grad_stride",
        "tl.load(grad_y + row[:, None] * width",
        NORMS,
    ),
    stride(
        "gradient of the sum read with the strides of the other, several rows",
        "_norm.py",
        "tl.load(grad_summed + row[:, None] * summed_stride",
        "tl.load(grad_summed + row[:, None] * grad_stride",
        NORMS,
    ),
    stride(
        "gradient of the sum read with the strides of the other, one row",
        "_norm.py",
        "read(grad_summed + row * summed_stride",
        "read(grad_summed + row * grad_stride",
        NORMS,
    ),
    stride(
        "gradient of the sum read with the strides of the other, wide rows",
        "_norm_wide.py",
        "tl.load(grad_summed + row * summed_stride",
        "tl.load(grad_summed + row * grad_stride",
        NORMS,
    ),
    stride(
        "upstream gradient of the gated units read as if dense",
        "_gated.py",
        "grad_y.stride(0), first.stride(0)",
        "width, first.stride(0)",
        "swiglu and float32 and one_block",
    ),
    stride(
        "transposed upstream gradient of the gated units read as if its columns were adjacent",
        "_gated.py",
        "    grad_y = rows_of(grad_y)\n",
        "    grad_y = grad_y.reshape(-1, grad_y.shape[-1])\n",
        "swiglu and float32 and frozen_up",
    ),
    stride(
        "upstream gradients of rope read as if dense",
        "rope.py",
        "*x1.stride()[:3], *x2.stride()[:3], *out1",
        "*(out1 if backward else x1).stride()[:3], *(out2 if backward else x2).stride()[:3], *out1",
        "rope and float32 and plain",
    ),
    stride(
        "per-token gradient of the loss read as if dense",
        "_softmax_loss.py",
        "out.stride(0), row_factor.stride(0), width",
        "out.stride(0), min(row_factor.stride(0), 1), width",
        "cross_entropy and float32 and none",
    ),
    shared_stride(
        "gradients of losses and log-probabilities read as if dense",
        "_chunked_loss.py",
        "for g in (grad_loss, grad_entropy)]",
        "for g in (grad_loss if grad_loss is None else grad_loss.as_strided(statistics.shape[:1], (1,)), grad_entropy)]",
    ),
    shared_stride(
        "gradient of the entropy read as if dense",
        "_chunked_loss.py",
        "for g in (grad_loss, grad_entropy)]",
        "for g in (grad_loss, grad_entropy if grad_entropy is None else grad_entropy.as_strided(statistics.shape[:1], (1,)))]",
    ),
    # What nobody asked for, extreme inputs, memory that belongs to others.
    Mutant(
        "triton: every gradient of the gated units is computed, whatever is asked for",
        f"{TRITON}/_gated.py",
        "t.new_empty(t.shape) if need and t is not None",
        "t.new_empty(t.shape) if t is not None",
        (ACCURACY, "--backend", "triton", "-k", "nobody_asked_for and (swiglu or layer_norm)"),
        "grad_up must be None where nobody asked for it",
        interpreted=True,
    ),
    Mutant(
        "every gradient is asked for",
        f"{CORE}/kernels.py",
        "[given[first] or given[last] for first, last in targets]",
        "[True for _ in targets]",
        (ACCURACY, "--backend", "triton", "-k", "nobody_asked_for and (swiglu or layer_norm)"),
        "one gradient must be asked for",
        interpreted=True,
    ),
    Mutant(
        "triton: a sigmoid that overflows",
        f"{TRITON}/_gated.py",
        "sigmoid = tl.sigmoid(gate)",
        "sigmoid = tl.exp(gate) / (1.0 + tl.exp(gate))",
        (ACCURACY, "--backend", "triton", "-k", "shifted and swiglu and raised"),
        "test_small_large_and_shifted_inputs_keep_the_accuracy",
        interpreted=True,
    ),
    kernel(
        "triton: the forward of the gated units stores without a mask",
        "_gated.py",
        "tl.store(y + row * width + column, value.to(y.dtype.element_ty), mask=mask)",
        "tl.store(y + row * width + column, value.to(y.dtype.element_ty))",
        f"swiglu and {SMALL}",
        "liger_triton::swiglu wrote outside its tensors: y (",
    ),
    kernel(
        "triton: column sums of the norms are stored without a mask",
        "_norm_sum.py",
        "tl.store(gradient + column, total.to(gradient.dtype.element_ty), mask=column < width)",
        "tl.store(gradient + column, total.to(gradient.dtype.element_ty))",
        f"rms_norm and {SMALL}",
        "rms_norm_backward wrote outside its tensors: grad_weight (100,)",
    ),
    # The divergences.
    loss(
        "the mixture has the student's share where it should have the teacher's",
        "_divergence.py",
        "share = _either(ahead, options.beta, 1.0 - options.beta, far)",
        "share = _either(ahead, 1.0 - options.beta, options.beta, far)",
        "tests/ops/test_linear_divergence.py",
        "test_linear_divergence_is_composed_of_functions_of_pytorch",
    ),
    loss(
        "the divergence adds terms that cancel",
        "_divergence.py",
        "smaller, near = (-far).exp(), far < NEAR",
        "smaller, near = (-far).exp(), far < 0.0",
        "tests/ops/test_linear_divergence.py::test_a_student_close_to_its_teacher_has_a_divergence_of_all_digits",
        "test_a_student_close_to_its_teacher_has_a_divergence_of_all_digits",
    ),
    loss(
        "the hard part has the temperature",
        "_divergence.py",
        "own = (x.gather(-1, _inside(labels, x)[:, None])[:, 0] - moments[:, 0]) * options.temperature",
        "own = x.gather(-1, _inside(labels, x)[:, None])[:, 0] - moments[:, 0]",
        "tests/ops/test_linear_divergence.py::test_a_hard_weight_of_one_is_the_cross_entropy_without_temperature",
        "test_a_hard_weight_of_one_is_the_cross_entropy_without_temperature",
    ),
    loss(
        "the kept gradient of rows meets the upstream gradient in dX alone",
        "_divergence_loop.py",
        "accumulate(of_weight, kept.t(), torch.mul(hidden, factor[:, None], out=torch.empty_like(hidden)), first=True)",
        "accumulate(of_weight, kept.t(), hidden, first=True)",
        "tests/ops/test_linear_divergence.py::test_kept_and_recomputed_logits_give_the_same_gradients",
        "test_kept_and_recomputed_logits_give_the_same_gradients",
    ),
    loss(
        "the upstream gradient of an ignored row counts",
        "_divergence_loop.py",
        "factor = torch.where(pair.target != options.ignore_index, grad_loss, 0.0)",
        "factor = grad_loss + 0.0",
        "tests/ops/test_linear_divergence.py::test_an_ignored_row_has_nothing_whatever_arrives",
        "test_an_ignored_row_has_nothing_whatever_arrives",
    ),
    kernel(
        "triton: the divergence forgets the offset of the two normalizers",
        "_divergence.py",
        "apart = (beneath - below) + offset",
        "apart = beneath - below",
        f"kl_div and {SMALL}",
    ),
    kernel(
        "triton: the gradient of the reverse KL forgets the mean of h",
        "_divergence.py",
        "q * (slope - mean)",
        "q * slope",
        "kl_div and float32 and reverse_none",
    ),
    kernel(
        "triton: classes that are impossible on both sides give NaN",
        "_divergence.py",
        """apart = tl.where((below == float("-inf")) & (beneath == float("-inf")), 0.0, apart)""",
        "apart = apart + 0.0",
        "jsd and float32 and padded_classes",
    ),
    stride(
        "upstream gradient of a divergence read as if dense",
        "_divergence.py",
        "student.stride(0), teacher.stride(0), row_factor.stride(0), out.stride(0)",
        "student.stride(0), teacher.stride(0), min(row_factor.stride(0), 1), out.stride(0)",
        "kl_div and float32 and none",
    ),
    Mutant(
        "the bucket of the other classes is what the chosen ones have",
        f"{CORE}/losses_distillation.py",
        "torch.cat((side, _log_tail(side)), -1)",
        "torch.cat((side, side.logsumexp(-1, keepdim=True)), -1)",
        ("tests/ops/test_losses_distillation.py",),
        "test_topk_distillation_is_the_divergence_of_its_buckets",
    ),
)
