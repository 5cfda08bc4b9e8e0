# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers compute the same losses: their own methods run on stand-ins for models. docs/losses.md lists what
differs."""

import importlib
from collections import defaultdict
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core.losses import (
    Averaging,
    Cispo,
    Clip,
    Head,
    Likelihood,
    OffPolicy,
    Penalty,
    cpo,
    dft,
    dpo,
    grpo,
    kto,
    kto_baseline,
    orpo,
    simpo,
)

trl = pytest.importorskip("trl", reason="needs trl: pip install trl")
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def the(x: Any) -> Any:
    return x


ACCELERATOR = SimpleNamespace(
    device=CPU, num_processes=1, gather=the, gather_for_metrics=the, parallelism_config=None,
    reduce=lambda x, reduction: x, sync_gradients=True,
)  # fmt: skip


def trainer_of(kind: type, **attributes: Any) -> Any:
    """A trainer with all its methods, whose attributes are set by hand: no model is loaded and no data is read."""
    trainer = kind.__new__(kind)
    common = {
        "accelerator": ACCELERATOR, "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1,
        "current_gradient_accumulation_steps": 1,
    }  # fmt: skip
    for name, value in {**common, **attributes}.items():
        object.__setattr__(trainer, name, value)
    return trainer


class Answers:
    """Four padded answers after prompts of one token: what a model's head gives, and what other policies gave."""

    def __init__(self, tokens: int = 6) -> None:
        self.mask = torch.rand(4, tokens) < 0.8
        self.mask[:, :2] = True
        self.leaf = (-2.0 * torch.rand(4, tokens, dtype=torch.float64)).requires_grad_()
        self.reference, self.old, self.sampling = (
            torch.where(self.mask, self.policy.detach() + 0.4 * torch.randn(4, tokens), 0.0) for _ in range(3)
        )
        self.entropies = torch.rand(4, tokens, dtype=torch.float64).requires_grad_()
        self.advantage = torch.tensor([1.3, -0.7, -1.1, 0.4], dtype=torch.float64)
        self.desirable = torch.tensor([True, False, False, True])

    @property
    def policy(self) -> Tensor:
        return torch.where(self.mask, self.leaf, 0.0)

    @property
    def entropy(self) -> Tensor:
        return torch.where(self.mask, self.entropies, 0.0)

    @property
    def outputs(self) -> SimpleNamespace:
        """What TRL's patched model returns."""
        nothing = torch.zeros_like(self.policy)
        return SimpleNamespace(
            log_probs=self.policy, entropy=self.entropy, mean_logits=nothing, is_top1=nothing.bool(),
            label_mask=self.mask, aux_loss=None,
        )  # fmt: skip

    @property
    def inputs(self) -> dict[str, Tensor]:
        whole = torch.cat([torch.zeros(4, 1, dtype=torch.bool), self.mask], 1)
        return {
            "input_ids": torch.ones_like(whole, dtype=torch.int64),
            "attention_mask": whole.long(),
            "completion_mask": whole.long(),
        }

    def model(self, **_: Any) -> SimpleNamespace:
        return self.outputs


def assert_same(ours: Tensor, theirs: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours), rtol=1e-6, atol=1e-9)
    for a, b in zip(*(torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


def trl_dpo(answers: Answers, kind: str, beta: float, label_smoothing: float = 0.0) -> tuple[Tensor, dict[str, Any]]:
    trainer = trainer_of(
        trl.DPOTrainer, beta=beta, label_smoothing=label_smoothing, loss_types=[kind], loss_weights=[1.0],
        precompute_ref_logps=True, f_divergence_type="reverse_kl", ld_alpha=None, use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05),
    )  # fmt: skip
    chosen, rejected = answers.reference.sum(-1).chunk(2)
    inputs = {**answers.inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return trainer._compute_loss(answers.model, inputs, False), trainer._metrics["train"]


DPO = {
    "sigmoid": ("sigmoid", 0.1, {}),
    "hinge": ("hinge", 0.1, {}),
    "robust": ("robust", 0.1, {"label_smoothing": 0.1}),
    "exo_pair": ("exo", 0.1, {"label_smoothing": 1e-3}),
    "nca_pair": ("nca", 0.01, {}),
    "sppo_hard": ("sppo", 0.5, {}),
    "bco_pair": ("bco", 0.01, {}),
    "apo_zero": ("apo-zero", 0.1, {}),
    "apo_down": ("apo-down", 0.1, {}),
    "discopop": ("discopop", 0.05, {}),
    "ipo": ("ipo", 0.1, {"length_normalized": True}),
    "sigmoid_norm": ("sigmoid", 2.0, {"length_normalized": True}),
}


def test_the_configurations_of_trl_have_the_names_in_the_table_of_options(generators: Any) -> None:
    experimental = ("cpo", "orpo", "gkd", "server_distillation")
    modules = [trl, *(importlib.import_module(f"trl.experimental.{name}") for name in experimental)]
    for loss, (config, named) in generators.loss_options.TRL.items():
        found = [getattr(module, config) for module in modules if config and hasattr(module, config)]
        assert bool(found) == bool(config), config
        names = {name for value in named.values() for name in value.split(", ")}
        assert not found or names <= {field.name for field in fields(found[0])}, loss


@pytest.mark.parametrize("theirs", DPO)
def test_dpo_is_that_of_trl(theirs: str) -> None:
    variant, beta, options = DPO[theirs]
    answers = Answers()
    expected, logged = trl_dpo(answers, theirs, beta, float(options.get("label_smoothing", 0.0)))
    loss, metrics = dpo(answers.policy, answers.reference, mask=answers.mask, variant=variant, beta=beta, **options)
    assert_same(loss, expected, answers.leaf)
    if "length_normalized" not in options:
        names = (
            *(f"rewards/{n}" for n in ("chosen", "rejected", "margins", "accuracies")),
            "logps/chosen",
            "logps/rejected",
        )
        assert list(map(float, metrics[:6])) == pytest.approx([logged[name][0] for name in names])


def test_difference_trl_logs_rewards_that_are_not_length_normalized() -> None:
    answers = Answers()
    _, logged = trl_dpo(answers, "sigmoid_norm", 2.0)
    _, metrics = dpo(answers.policy, answers.reference, mask=answers.mask, beta=2.0, length_normalized=True)
    assert float(metrics.chosen_reward) != pytest.approx(logged["rewards/chosen"][0])


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto_is_that_of_trl(kind: str) -> None:
    answers, others = Answers(), Answers()
    # The mean over answers to other prompts is above 0, so that it is not cut.
    others.reference = others.reference - 0.5 * others.mask
    trainer = trainer_of(
        trl.KTOTrainer,
        beta=0.1,
        loss_type=kind,
        desirable_weight=1.0,
        undesirable_weight=1.33,
        calculate_KL=kind == "kto",
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: others.policy.detach().sum(-1) if kind == "kto" else None,
    )
    inputs = {
        **answers.inputs,
        "label": answers.desirable,
        "ref_logps": answers.reference.sum(-1),
        "ref_KL_logps": others.reference.sum(-1),
    }
    expected = trainer._compute_loss(answers.model, inputs, False)
    baseline = kto_baseline(others.policy, others.reference, mask=others.mask) if kind == "kto" else 0.0
    given, weights = (answers.policy, answers.reference, answers.desirable), (1.0, 1.33)
    loss, metrics = kto(*given, mask=answers.mask, baseline=baseline, weights=weights)
    assert_same(loss, expected, answers.leaf)
    logged = trainer._metrics["train"]
    found = [metrics.desirable_reward, metrics.undesirable_reward, metrics.margin, metrics.baseline]
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl")
    assert list(map(float, found)) == pytest.approx([logged[name][0] for name in names])


ARGUMENTS = {
    "use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}  # fmt: skip
SETTINGS = {
    "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token",
    "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "use_vllm": False,
    "vllm_importance_sampling_correction": False, "max_completion_length": 17, "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False, "entropy_coef": 0.0,
}  # fmt: skip


def trl_grpo(
    answers: Answers, kind: str, inputs: dict[str, Any] | None = None, **changes: Any
) -> tuple[Tensor, dict[str, Any]]:
    arguments = {**ARGUMENTS, **{name: changes.pop(name) for name in list(changes) if name in ARGUMENTS}}
    trainer = trainer_of(
        trl.GRPOTrainer,
        args=SimpleNamespace(**arguments),
        _get_per_token_logps_and_entropies=lambda *_, **__: (answers.policy, answers.entropy, None),
        **{**SETTINGS, "loss_type": kind, **changes},
    )
    mask, prompt = answers.mask.long(), torch.ones(4, 1, dtype=torch.int64)
    given = {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": torch.ones_like(mask), "completion_mask": mask,
        "advantages": answers.advantage, "old_per_token_logps": answers.old, "ref_per_token_logps": answers.reference,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    return trainer._compute_loss(None, {**given, **(inputs or {})}), trainer._metrics["train"]


CORRECTION = {"use_vllm": True, "vllm_importance_sampling_correction": True}
SEQUENCE = {"importance_sampling_level": "sequence"}
GRPO: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "two_sided": ("grpo", {"delta": 1.5}, {"variant": Clip(delta=1.5)}),
    "bnpo": ("bnpo", {}, {"averaging": Averaging("token")}),
    "dr-grpo": ("dr_grpo", {}, {"variant": "dr-grpo", "averaging": Averaging("constant", length=17)}),
    "dapo": ("dapo", {"epsilon_high": 0.28}, {"variant": "dapo"}),
    "gspo": ("grpo", {"epsilon_low": 3e-4, "epsilon_high": 4e-4, **SEQUENCE}, {"variant": "gspo"}),
    "luspo": ("luspo", {"epsilon_low": 2e-3, "epsilon_high": 2.5e-3, **SEQUENCE}, {"variant": "luspo"}),
    "cispo": ("cispo", {"epsilon_high": 1.2}, {"variant": Cispo(high=1.2)}),
    "sapo": ("sapo", {}, {"variant": "sapo"}),
    "vespo": ("vespo", {}, {"variant": "vespo"}),
}


@pytest.mark.parametrize("name", GRPO)
@pytest.mark.parametrize("beta", [0.0, 0.3], ids=["alone", "with_kl"])
def test_grpo_is_that_of_trl(name: str, beta: float) -> None:
    kind, theirs, ours = GRPO[name]
    answers = Answers()
    expected, logged = trl_grpo(answers, kind, beta=beta, **theirs)
    penalty = Penalty(answers.reference if beta else None, beta=beta)
    loss, metrics = grpo(answers.policy, answers.old, answers.advantage, mask=answers.mask, penalty=penalty, **ours)
    assert_same(loss, expected, answers.leaf)
    if beta:
        assert float(metrics.kl) == pytest.approx(logged["kl"][0])
    if kind in ("grpo", "dapo", "bnpo", "dr_grpo") and "importance_sampling_level" not in theirs:
        found = [float(metrics.clipped_low), float(metrics.clipped_high)]
        assert found == pytest.approx([logged["clip_ratio/low_mean"][0], logged["clip_ratio/high_mean"][0]])


@pytest.mark.parametrize("variant", ["dapo", "gspo"])
def test_the_unbiased_divergence_is_that_of_trl_for_gspo_at_the_level_of_sequences(variant: Any) -> None:
    answers = Answers()
    kind, clip, _ = GRPO[variant]
    expected, _ = trl_grpo(answers, kind, beta=0.3, use_bias_correction_kl=True, **clip)
    penalty = Penalty(answers.reference, beta=0.3, unbiased=True, level="sequence" if variant == "gspo" else "token")
    loss, _ = grpo(answers.policy, answers.old, answers.advantage, mask=answers.mask, variant=variant, penalty=penalty)
    assert_same(loss, expected, answers.leaf)


def test_the_entropy_bonus_is_that_of_trl_where_tokens_are_averaged() -> None:
    answers = Answers()
    expected, logged = trl_grpo(answers, "bnpo", _entropy_bonus_enabled=True, entropy_coef=0.2)
    policy, options = (
        (answers.policy, answers.entropy),
        {"averaging": Averaging("token"), "penalty": Penalty(entropy=0.2)},
    )
    loss, metrics = grpo(policy, answers.old, answers.advantage, mask=answers.mask, **options)
    assert_same(loss, expected, answers.leaf, answers.entropies)
    assert float(metrics.entropy) == pytest.approx(logged["entropy"][0])


@pytest.mark.parametrize("kind", ["grpo", "dapo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights_enter_the_loss_as_in_trl(kind: str, level: str, mode: str) -> None:
    """TRL computes the ratio while it generates; its definition is that of tests/losses/papers.py."""
    answers = Answers()
    off_policy = OffPolicy(answers.sampling, weight=mode, level=level, low=0.5, high=2.0)
    weights = off_policy.weights(answers.old, answers.sampling)
    theirs = {**CORRECTION, "beta": 0.3, "epsilon_high": 1.2 if kind == "cispo" else 0.2}
    expected, _ = trl_grpo(answers, kind, {"importance_sampling_ratio": weights}, **theirs)
    options: dict[str, Any] = {
        "mask": answers.mask,
        "penalty": Penalty(answers.reference, beta=0.3),
        "off_policy": off_policy,
        "variant": Cispo(high=1.2) if kind == "cispo" else Clip(),
        "averaging": Averaging("sequence" if kind == "grpo" else "token"),
    }
    loss, _ = grpo(answers.policy, answers.old, answers.advantage, **options)
    assert_same(loss, expected, answers.leaf)


def test_off_policy_sequences_are_masked_as_in_trl() -> None:
    answers = Answers()
    given = {"sampling_per_token_logps": answers.sampling}
    expected, _ = trl_grpo(answers, "grpo", given, off_policy_mask_threshold=0.05)
    off_policy = OffPolicy(answers.sampling, weight=None, threshold=0.05)
    loss, metrics = grpo(answers.policy, answers.old, answers.advantage, mask=answers.mask, off_policy=off_policy)
    assert_same(loss, expected, answers.leaf)
    assert 0.0 < float(metrics.on_policy) < 1.0


def test_difference_the_unbiased_divergence_of_gspo_has_ratios_of_tokens() -> None:
    answers = Answers()
    clip = {"epsilon_low": 3e-4, "epsilon_high": 4e-4, **SEQUENCE}
    theirs = [trl_grpo(answers, "grpo", beta=b, use_bias_correction_kl=True, **clip)[0] for b in (1.0, 0.0)]
    given: dict[str, Any] = {"mask": answers.mask, "penalty": Penalty(answers.reference, beta=1.0, unbiased=True)}
    _, metrics = grpo(answers.policy, answers.old, answers.advantage, variant="gspo", **given)
    d = answers.reference - answers.policy
    of_tokens = ((answers.policy - answers.old).exp() * (d.exp() - d - 1))[answers.mask].mean()
    assert float(metrics.kl) == pytest.approx(float(of_tokens))
    assert float(theirs[0] - theirs[1]) != pytest.approx(float(metrics.kl), rel=1e-3)


class Pairs:
    """Two pairs of answers for the trainers that compute logits: hidden states, a head and labels."""

    def __init__(self, prompt: int = 2) -> None:
        ids, attended = torch.randint(3, 20, (4, 7)), torch.ones(4, 7, dtype=torch.int64)
        # The right end of two answers is padding.
        attended[1, 5:], attended[2, 6:] = 0, 0
        labels = torch.where(attended == 1, ids, -100)
        labels[:, :prompt] = -100
        self.hidden = torch.randn(4, 7, 8, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
        self.head = Head(self.hidden[:, :-1], self.weight, labels[:, 1:])
        columns = {"input_ids": ids, "attention_mask": attended, "labels": labels}
        self.batch = {f"{kind}_{name}": x[rows] for kind, rows in KINDS.items() for name, x in columns.items()}

    def model(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.hidden @ self.weight.t())


KINDS = {"chosen": slice(0, 2), "rejected": slice(2, 4)}


def trl_pairs(kind: type, pairs: Pairs, **attributes: Any) -> tuple[Tensor, dict[str, Any]]:
    common = {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, "beta": 0.1, "label_smoothing": 0.0}
    loss, metrics = trainer_of(kind, **{**common, **attributes}).get_batch_loss_metrics(pairs.model, pairs.batch)
    return loss, metrics


CPO: dict[str, tuple[dict[str, Any], Any]] = {
    "sigmoid": ({"loss_type": "sigmoid", "cpo_alpha": 1.0, "beta": 0.1}, cpo),
    "label_smoothing": ({"loss_type": "sigmoid", "cpo_alpha": 0.5, "label_smoothing": 0.1}, partial(cpo, likelihood=Likelihood(0.5, Averaging("token")), label_smoothing=0.1)),
    "hinge": ({"loss_type": "hinge", "cpo_alpha": 1.0}, partial(cpo, variant="hinge")),
    "ipo": ({"loss_type": "ipo", "cpo_alpha": 1.0}, partial(cpo, variant="ipo", length_normalized=True)),
    "simpo": ({"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}, simpo),
    "simpo_label_smoothing": ({"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 0.3, "label_smoothing": 0.1}, partial(simpo, beta=2.5, gamma=0.3, label_smoothing=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CPO)
def test_cpo_and_simpo_are_those_of_trl(name: str) -> None:
    cpo_trainer = pytest.importorskip("trl.experimental.cpo")
    attributes, ours = CPO[name]
    pairs = Pairs()
    expected, logged = trl_pairs(cpo_trainer.CPOTrainer, pairs, **{"alpha": 0.0, "simpo_gamma": 0.5, **attributes})
    loss, metrics = ours(pairs.head)
    assert_same(loss, expected, pairs.hidden, pairs.weight)
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    assert list(map(float, metrics[:4])) == pytest.approx([logged[name] for name in names], rel=1e-5)


def test_orpo_is_that_of_trl_where_the_prompt_is_learned_too() -> None:
    orpo_trainer = pytest.importorskip("trl.experimental.orpo")
    pairs = Pairs(prompt=0)
    expected, logged = trl_pairs(orpo_trainer.ORPOTrainer, pairs)
    loss, metrics = orpo(pairs.head, likelihood=Likelihood(averaging=Averaging("token")))
    # TRL computes the odds in float32.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x, (pairs.hidden, pairs.weight)) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert float(metrics.margin) == pytest.approx(0.1 * float(logged["log_odds_chosen"]), rel=1e-4)


def test_dft_is_that_of_trl() -> None:
    answers = Answers()
    args = SimpleNamespace(loss_type="dft", average_tokens_across_devices=False)
    trainer = trainer_of(trl.SFTTrainer, args=args, compute_loss_func=None, label_smoother=None)
    inputs = {key: answers.inputs[key] for key in ("input_ids", "attention_mask")}
    expected = trainer.compute_loss(answers.model, inputs)
    loss, _ = dft(answers.policy, mask=answers.mask)
    assert_same(loss, expected, answers.leaf)


def test_difference_token_weights_of_gspo_weigh_the_gradients_of_their_tokens() -> None:
    answers = Answers()
    off_policy = OffPolicy(answers.sampling)
    weights = off_policy.weights(answers.old, answers.sampling)
    theirs = {**CORRECTION, **SEQUENCE}
    expected, _ = trl_grpo(answers, "grpo", {"importance_sampling_ratio": weights}, **theirs)
    options: dict[str, Any] = {"mask": answers.mask, "variant": Clip(level="sequence"), "off_policy": off_policy}
    loss, _ = grpo(answers.policy, answers.old, answers.advantage, **options)
    torch.testing.assert_close(loss, expected)
    ours, shared = (torch.autograd.grad(x, answers.leaf)[0] for x in (loss, expected))
    # The sum over an answer is the same; TRL shares it equally.
    torch.testing.assert_close(ours.sum(-1), shared.sum(-1))
    assert float((ours - shared).abs().max()) > 1e-4
