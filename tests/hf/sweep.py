# SPDX-License-Identifier: Apache-2.0
"""Every causal language model type of Transformers, unpatched and patched: loss, logits, all gradients, training,
evaluation, undo.

`python tests/hf/sweep.py` checks each type in a process of its own, so that a crash or a hang is a row of the table and
no end of the sweep, keeps what it has found in .sweep/results.jsonl, and writes docs/models.md. A second start resumes
it.
"""

import argparse
import copy
import hashlib
import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedModel

import liger_hf
from hf.tiny_configs import COMPOSITES, TYPES, VOCABULARY, drawn, tiny_config
from liger_core import use
from liger_core.accuracy import floor
from liger_hf.isolation import DoublePrecision
from liger_hf.report import REPLACED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".sweep" / "results.jsonl"
PAGE = ROOT / "docs" / "models.md"
COLUMNS = {
    "norm": ("rms_norm", "layer_norm", "gated_rms_norm", "group_norm", "modulated_rms_norm", "modulated_layer_norm"),
    "residual": ("add_rms_norm", "add_layer_norm", "sinkhorn"),
    "MLP": ("swiglu", "geglu", "relu_squared"),
    "experts": ("experts",),
    "rope": ("rope",),
    "q/k norm + rope": ("qk_norm_rope",),
    "head": ("linear_cross_entropy",),
}
# What Transformers' models do not have until PEFT wraps them (tests/hf/test_lora.py).
ADDED = ("lora_linear",)
# What `apply` replaces only where only= names it (tests/hf/test_embedding.py).
ON_REQUEST = ("embedding",)
# What people call the models, and their model types.
FAMILIES = {
    name: types.split()
    for name, types in {
        "Llama 1 to 4, and models of their architecture": "llama llama4_text",
        "Qwen 2 to 3.5, dense and mixture of experts": "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text",
        "Mistral, Ministral, Mixtral": "mistral ministral ministral3 mixtral",
        "Gemma 1 to 4": "gemma gemma2 gemma3_text gemma3n_text gemma4_text",
        "DeepSeek V2 and V3, Kimi Linear": "deepseek_v2 deepseek_v3 deepseek_v32 kimi_linear",
        "Phi-3 and Phi-4, Phi MoE": "phi3 phimoe",
        "GLM 4, gpt-oss, MiniMax": "glm4 glm4_moe gpt_oss minimax minimax_m2",
        "OLMo 1 to 3, SmolLM 3, Granite, Cohere": "olmo olmo2 olmo3 smollm3 granite granitemoe cohere cohere2",
        "Mamba 2, Jamba, Bamba, Nemotron, Falcon H1, LFM 2": "mamba2 jamba bamba nemotron nemotron_h falcon_h1 lfm2",
        "GPT-2, GPT-NeoX (Pythia), OPT, BLOOM, Falcon, MPT": "gpt2 gpt_neox opt bloom falcon mpt",
    }.items()
}  # fmt: skip
CLASSES = {"": AutoModelForCausalLM, "vision": AutoModelForImageTextToText, "seq2seq": AutoModelForSeq2SeqLM}
SAME, WRONG, UNBUILT = "same", "wrong", "not built"
SECONDS = 300
DRAWS = 3


@dataclass
class Result:
    """One type: what was replaced (column → modules replaced, modules left) and whether the results are those of the
    unpatched model.

    raised  the exception behind the reason why a type was not compared
    """

    model_type: str
    verdict: str
    model: str = ""
    detail: str = ""
    raised: str = ""
    columns: dict[str, tuple[int, int]] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def check(model_type: str) -> Result:
    """Build the type, patch a copy, and compare."""
    began = time.monotonic()
    with use("reference"):
        result = _checked(model_type)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _checked(model_type: str) -> Result:
    try:
        plain = build(model_type)
        expected = _outcomes(plain)
    except Exception as problem:
        return Result(model_type, UNBUILT, detail=why_not(problem), raised=_short(problem))
    report, inexact, rounded = _compared(plain, expected)
    result = Result(model_type, SAME, type(plain).__name__)
    count(result, report)
    for draw in range(1, DRAWS):
        if inexact or not rounded:
            break
        # A ReLU whose input is within a rounding of 0 has either gradient, and errors of a gradient of three numbers
        # (GLM-5 Next) differ up to tenfold by luck either way. What is less accurate is so with other weights, too.
        other = build(model_type, draw)
        _, inexact, rounded = _compared(other, _outcomes(other))
    if problems := inexact + rounded:
        more = f"; {len(problems) - 3} more" if len(problems) > 3 else ""
        result.verdict, result.detail = WRONG, "; ".join(problems[:3]) + more
    return result


def _compared(plain: Any, expected: dict[str, Tensor]) -> tuple[liger_hf.Report, list[str], list[str]]:
    """The report of a patched copy; what it computes differently in float64, and after `undo`; and where it is less
    accurate in float32."""
    with DoublePrecision():
        exact = _outcomes(_wide(plain))
    patched = copy.deepcopy(plain)
    report = liger_hf.apply(patched)
    try:
        with DoublePrecision():
            problems = differences(_outcomes(_wide(patched)), exact, None)
    except CheckpointError:
        # Function modes are off in a backward pass, so a head that casts its logits itself (Dory) is recomputed in
        # float32: no float64 to compare.
        problems = []
    rounded = differences(_outcomes(patched), exact, expected)
    report.undo()
    undone = _outcomes(patched)
    problems += [f"after undo, {name} differs" for name, v in undone.items() if not torch.equal(v, expected[name])]
    return report, problems, rounded


def differences(got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor] | None) -> list[str]:
    """The differences of a patched model: in float64 (without `plain`) any difference, in float32 results less accurate
    than `plain`.

    The errors of a whole model are sums of many roundings, which another order of the same sums changes by a factor of
    two; 3 is the factor that `liger demo` uses. A gradient that is zero but for round-off is measured against all the
    gradients.
    """
    if got.keys() != exact.keys():
        return [f"{name} on one side only" for name in sorted(got.keys() ^ exact.keys())]
    gradients = [float(v.double().square().mean().sqrt()) for name, v in exact.items() if "gradient" in name]
    scale = max(gradients, default=0.0)
    problems = []
    for name, value in got.items():
        true = exact[name].double()
        size = max(float(true.square().mean().sqrt()), 1e-3 * scale if "gradient" in name else 0.0) or 1.0

        def error(result: Tensor, true: Tensor = true, size: float = size) -> float:
            return float((result.double() - true).square().mean().sqrt()) / size

        allowed = 1e-9 if plain is None else 3 * error(plain[name]) + floor(torch.float32)
        if value.shape != true.shape or not error(value) <= allowed:
            dtype = "float64" if plain is None else "float32"
            problems.append(f"{dtype}, {name}: error {error(value):.2e}, allowed {allowed:.2e}")
    return problems


def _wide(model: Any) -> Any:
    """The same model in float64."""
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            # The grouped matmul of torch does not support float64.
            module.set_experts_implementation("eager")
    return wide


MODES = ("training", "evaluation")


def build(model_type: str, draw: int = 0) -> Any:
    torch.manual_seed(draw)
    kind, _, name = model_type.rpartition(":")
    return drawn(CLASSES[kind].from_config(tiny_config(name)), draw + 1)


def _outcomes(model: nn.Module) -> dict[str, Tensor]:
    return {f"{mode}, {name}": value for mode in MODES for name, value in _outcome(model, mode).items()}


def _outcome(model: nn.Module, mode: str) -> dict[str, Tensor]:
    """Loss and logits, and in training also the gradient of every parameter."""
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :4] = -100
    torch.manual_seed(3)
    model.train(mode == "training")
    model.zero_grad()
    with torch.set_grad_enabled(mode == "training"):
        # A model of two parts may not accept use_cache.
        options = {} if model.config.is_encoder_decoder else {"use_cache": False}
        outputs = model(input_ids=ids, labels=labels, **options)
    results = {"loss": outputs.loss.detach(), "logits": outputs.logits.detach()}
    if mode == "training":
        outputs.loss.backward()
        results |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return results


def count(result: Result, report: liger_hf.Report) -> None:
    for column, ops in COLUMNS.items():
        counts = [0, 0]
        reasons: Counter[str] = Counter()
        for row in report.rows:
            if row.op in ops:
                counts[row.verdict != REPLACED] += row.count
                if row.verdict != REPLACED:
                    reasons[f"{row.module}: {row.reason}"] += row.count
        result.columns[column] = (counts[0], counts[1])
        result.reasons[column] = [reason for reason, _ in reasons.most_common()]


# What an exception of a model that was not compared means; the first that matches.
TEXT_ONLY = "its forward requires {}, and the sweep has text only"
PARTS_UNSAID = "its configuration class does not say which models its parts are"
NOT_COMPARED = (
    (r"requires the (\w+) library|No module named '(\w+)'", "the package {} is not installed"),
    (r"missing \d+ required positional arguments?: '(\w+)'|one of encoder_outputs or (\w+)", TEXT_ONLY),
    (r"[Yy]ou (?:have to|must) specify[^`\w]*(?:either |exactly one of )?`?(\w+)", TEXT_ONLY),
    (r"Exactly 1 of (\w+)|^(Bbox) is required", TEXT_ONLY),
    (r"input batch_size \(0\)", "its loss is that of what follows an image, and the sweep has text only"),
    (r"sub-configurations|Field 'text_encoder'|class <class 'NoneType'>", PARTS_UNSAID),
    (r"configuration class <class '[\w.]+\.(\w+)'>", "no auto class makes a language model from {}"),
    (r"element of type (None)Type|(None)Type' (?:has no len|object is not subscriptable)|dtype=(None)Type", "a size in its default configuration is {}"),
    (r"Class validation error", "its configuration class refuses the small sizes of its parts"),
    (r"shared_kv_states cannot be None", "it only drafts for another model"),
    (r"set the (pad_token_id) attribute", "its default configuration has no {}"),
    (r"OutputWithPast' object has no attribute", "its forward fails without images"),
    (r"'\w+' object has no attribute '(\w+)'", "its default configuration has no {}"),
)  # fmt: skip


def why_not(problem: BaseException) -> str:
    """A reason for the page, in a few words."""
    for pattern, words in NOT_COMPARED:
        if match := re.search(pattern, str(problem)):
            return words.format(*(group.replace("Bbox", "bbox") for group in match.groups() if group))
    return "its model does not run in a small size"


def _short(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:140]}"


# -- the sweep


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all by default. The page keeps the rows of the others")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    options = parser.parse_args()
    key = fingerprint()
    known = {} if options.fresh else _known(key)
    chosen = options.types or [*TYPES, *COMPOSITES]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf.sweep"])
    for number, model_type in enumerate(chosen, 1):
        if model_type not in known or options.types:
            known[model_type] = _in_a_process(context, model_type)
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps({"key": key, **asdict(known[model_type])}) + "\n")
        result = known[model_type]
        cells = " ".join(f"{column} {done}/{done + left}" for column, (done, left) in result.columns.items())
        head = f"[{number}/{len(chosen)}] {model_type}: {result.verdict} {cells}"
        print(f"{head} {result.raised or result.detail} ({result.seconds} s)", flush=True)
    fresh = {t: known[t] for t in chosen}
    shown = list(({r.model_type: r for r in read(PAGE.read_text())} | fresh if options.types else fresh).values())
    PAGE.write_text(page(shown))
    for composite in (False, True):
        print(f"{PAGE.relative_to(ROOT)}: {summary(r for r in shown if (':' in r.model_type) == composite)}")
    return int(any(known[t].verdict == WRONG for t in chosen))


def fingerprint() -> str:
    """A digest of everything that a result depends on."""
    packages = sorted((ROOT / "packages").glob("liger-[ch]*/src/**/*.py"))
    sources = [*packages, Path(__file__), Path(__file__).with_name("tiny_configs.py")]
    text = b"".join(path.read_bytes() for path in sources) + f"{torch.__version__} {transformers.__version__}".encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _known(key: str) -> dict[str, Result]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found: dict[str, Result] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # The incomplete last line of a sweep that was killed.
            continue
        if row.pop("key") == key:
            found[row["model_type"]] = Result(**row)
    return found


def _in_a_process(context: Any, model_type: str) -> Result:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, model_type), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return receiver.recv()
        return Result(model_type, WRONG, detail=f"not done after {SECONDS} s")
    except EOFError:
        process.join()
        return Result(model_type, WRONG, detail=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(sender: Any, model_type: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        result = check(model_type)
    except Exception as problem:
        result = Result(model_type, WRONG, detail=_short(problem))
    sender.send(result)


# -- the page


def summary(results: Any) -> str:
    """How many types were compared, and in how many of them each part was replaced."""
    compared = [r for r in results if r.verdict != UNBUILT]
    counts = [f"{column} {sum(r.columns.get(column, (0, 0))[0] > 0 for r in compared)}" for column in COLUMNS]
    return f"{len(compared)} types compared: {', '.join(counts)}; wrong: {sum(r.verdict == WRONG for r in compared)}"


def line(result: Result) -> str:
    """The row of one type."""
    cells = []
    for column in COLUMNS:
        done, left = result.columns.get(column, (0, 0))
        cells.append(f"✓ {done}" if done and not left else f"{done} of {done + left}" if done or left else "–")
    return f"| {result.model_type} | {result.model} | {' | '.join(cells)} | {result.verdict} |"


def families(results: list[Result]) -> list[str]:
    """The table of the best-known models."""
    known = {r.model_type: r for r in results}
    words = {(True, False): "✓", (True, True): "partly", (False, True): "left", (False, False): "–"}
    rows = [f"| models | {' | '.join(COLUMNS)} | not replaced |", f"| --- |{' :---: |' * len(COLUMNS)} --- |"]
    for name, types in FAMILIES.items():
        cells, left = [], []
        for column in COLUMNS:
            counts = [(t, known[t].columns.get(column, (0, 0))) for t in types if t in known]
            done, remaining = (any(count[part] for _, count in counts) for part in (0, 1))
            cells.append(words[done, remaining])
            left += [f"{column} of {t}" for t, (_, remaining) in counts if remaining]
        rows.append(f"| {name} | {' | '.join(cells)} | {', '.join(left) or 'nothing'} |")
    return rows


def read(text: str) -> list[Result]:
    """The results that a page shows."""
    found: dict[str, Result] = {}
    for name, model, cells, verdict in re.findall(r"^\| (\S+) \| (\w+) \| (.*) \| (\w+) \|$", text, re.MULTILINE):
        counts = [[int(number) for number in re.findall(r"\d+", cell)] for cell in cells.split(" | ")]
        both = zip(COLUMNS, counts, strict=True)
        columns = {column: (c[0], c[1] - c[0] if len(c) > 1 else 0) for column, c in both if c}
        found[name] = Result(name, verdict, model, columns=columns)
    reasons, _, unbuilt = text.partition("## Why modules were left")[2].partition("## Not compared")
    for column, reason, types in re.findall(r"^\* (.+?) – (.*) \(([^()]*)\)$", reasons, re.MULTILINE):
        for name in types.split(", "):
            found[name].reasons.setdefault(column, []).append(reason)
    pairs = re.findall(r"^\* (\S+): (.*)$", unbuilt, re.MULTILINE)
    found |= {name: Result(name, UNBUILT, detail=detail) for name, detail in pairs}
    return [found[name] for name in (*TYPES, *COMPOSITES) if name in found]


def page(results: list[Result]) -> str:
    parts = [[r for r in results if (":" in r.model_type) == composite] for composite in (False, True)]
    compared = [r for r in results if r.verdict != UNBUILT]
    reasons = {(c, reason) for r in compared for c, rs in r.reasons.items() for reason in rs}
    where = {key: [r.model_type for r in compared if key[1] in r.reasons.get(key[0], ())] for key in reasons}
    heading = [
        f"| type | class | {' | '.join(COLUMNS)} | results |",
        f"| --- | --- | {' | '.join('---' for _ in COLUMNS)} | --- |",
    ]
    lines = [
        "# Supported models",
        "",
        "Find out which modules of a model Liger replaces. It finds modules by structure, so any other model works too.",
        "",
        "* ✓: replaced wherever the model has it",
        "* partly: replaced in some layers",
        "* left: present, but not replaced",
        "* –: not present",
        "",
        *families(results),
        "",
        "Vision-language and encoder-decoder models are [below](#models-of-several-parts).",
        "For your own model, run `liger inspect path/or/name`, which loads no weights.",
        "",
        "## Model types",
        "",
        (
            f"`nox -s sweep` compares every causal language model type of Transformers {transformers.__version__}, as a "
            "tiny random model, with and without Liger."
        ),
        "It compares loss, logits and the gradient of every parameter, in training and in evaluation.",
        "",
        "* In float64, both must agree to 1e-9.",
        f"* In float32, the patched model must be as accurate as the original, with one of {DRAWS} draws of weights.",
        "* After `undo`, both must agree bit for bit.",
        "",
        f"**{summary(parts[0])}.**",
        "",
        "| cell | meaning |",
        "| --- | --- |",
        "| ✓ n | all n modules are replaced |",
        "| n of m | the others are not, for [the reasons below](#why-modules-were-left) |",
        "| – | no module has the structure that is [replaced](../packages/liger-hf/README.md#what-is-replaced) |",
        "",
        (
            "For norm, MLP (SiLU and GELU gates, squared ReLUs), experts and rope, – means that the model has none. Every "
            "model adds residuals: – means that no forward passes such a sum directly to a norm."
        ),
        (
            "Some layers norm the terms of a sum (OLMo 2, EXAONE 4), or add in a function (BLOOM). GPT-2 has statements "
            "between sum and norm, and Falcon has one norm for two sums."
        ),
        "",
        *heading,
        *(line(r) for r in parts[0] if r.verdict != UNBUILT),
        "",
        "## Models of several parts",
        "",
        "Vision-language models, with text only, and encoder-decoder models.",
        "",
        f"**{summary(parts[1])}.**",
        "",
        *heading,
        *(line(r) for r in parts[1] if r.verdict != UNBUILT),
        "",
        "## Why modules were left",
        "",
        *(f"* {c} – {reason} ({', '.join(where[c, reason])})" for c, reason in sorted(reasons)),
        "",
        "## Not compared",
        "",
        *(f"* {r.model_type}: {r.detail}" for r in results if r.verdict == UNBUILT),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    # Under its name as a module, so that the results pickle.
    sys.path.insert(0, str(ROOT / "tests"))
    from hf import sweep

    raise SystemExit(sweep.main())
