# SPDX-License-Identifier: Apache-2.0
"""The page that answers whether a setup fits, in a browser, as `liger plan --serve` shows it."""

import json
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import urlencode

import pytest
import typer
import typer.main
from transformers import TrainingArguments

from docs.browser import CHROMIUM, Page, browser
from liger_core.errors import OptionError
from liger_train import techniques
from liger_train.options import setup_of
from liger_train.plan.fit import EXAMPLES, FILES, METHODS, page, script, server
from liger_train.plugin import liger_commands
from liger_train.setup import Setup

GENERATED = Path(__file__).parents[2] / "docs" / "generate"
SPEED = json.loads((FILES / "speed.json").read_text())
MODELS = json.loads((GENERATED / "fits.json").read_text())
POINTS = json.loads((GENERATED / "fits_checked.json").read_text())
GIB = 1 << 30
# On the CPU machines of most runs there is no browser.
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, str]]:
    """A page of a browser, and the address of the file."""
    folder = tmp_path_factory.mktemp("fit")
    (folder / "fit.html").write_text(page(MODELS))
    with browser(folder / "profile") as opened:
        yield opened, (folder / "fit.html").as_uri()


def fragment(point: dict[str, Any]) -> str:
    method, checkpoint, liger, _ = point["name"].split("/")
    batch, sequence, gpus = point["call"]
    options = {"method": method, "checkpoint": checkpoint, "liger": liger, "optimizer": point["optimizer"]}
    return "#" + urlencode({"model": point["model"], "batch": batch, "sequence": sequence, "gpus": gpus, **options})


def text(page: Page, name: str) -> str:
    return str(page.value(f"document.getElementById('{name}').textContent"))


@needs_browser
@pytest.mark.parametrize("point", POINTS[:3], ids=lambda point: "-".join(map(str, (point["name"], *point["call"]))))
def test_the_page_has_the_planners_peak_and_command(shown: tuple[Page, str], point: dict[str, Any]) -> None:
    opened, address = shown
    opened.open(address + fragment(point))
    peak = float(text(opened, "fit-peak").split()[0])
    assert peak == pytest.approx(point["peak_bytes"] / GIB, rel=0.015, abs=0.005)
    method, checkpoint, liger, shard = point["name"].split("/")
    batch, sequence, ranks = point["call"]
    options: Any = {"checkpoint": checkpoint, "liger": liger, "shard": shard, "optimizer": point["optimizer"]}
    setup = Setup(point["model"], batch, sequence, ranks=ranks, **options, **METHODS[method])
    assert sorted(text(opened, "fit-command").split()) == sorted(setup.command().split())


@needs_browser
def test_a_setup_fits_on_a_card_up_to_the_longest_sequence(shown: tuple[Page, str]) -> None:
    opened, address = shown
    opened.open(address)
    row = "document.querySelector('#fit-cards tr').innerText"
    longest = str(opened.value(row)).split("\t")[2].replace(",", "")
    for sequence, fits in ((int(longest), "yes"), (int(longest) + 64, "no")):
        opened.open(f"{address}#sequence={sequence}")
        assert str(opened.value(row)).split("\t")[1] == fits


@needs_browser
def test_the_page_can_be_used_with_the_keyboard(shown: tuple[Page, str]) -> None:
    opened, address = shown
    opened.open(address)
    before = text(opened, "fit-peak")
    opened.press("Tab")
    assert opened.value("document.activeElement.name") == "model"
    opened.press("Tab")
    opened.press("ArrowUp")
    assert opened.value("document.forms[0].method.value") == "bf16"
    assert text(opened, "fit-peak") != before
    for _ in range(6):
        opened.press("Tab")
    assert opened.value("document.activeElement.name") == "liger"
    opened.press(" ")
    assert "--liger none" in text(opened, "fit-command") or text(opened, "fit-missing")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_shows_everything_without_scrolling_sideways(shown: tuple[Page, str], scheme: str) -> None:
    opened, address = shown
    opened.open(address, width=400, scheme=scheme)
    assert opened.value("document.documentElement.scrollWidth") <= 400
    style = "getComputedStyle(document.querySelector('.fit select'))"
    ink, paper = (opened.value(f"{style}.{name}") for name in ("color", "backgroundColor"))
    assert ink != paper


# Every combination of the page's options, and what the page says to it.
EVERY = """(() => {
  const inputs = document.forms[0].elements, said = [];
  const values = name => [...inputs[name].options].map(option => option.value);
  for (const method of values("method")) for (const optimizer of values("optimizer")) for (const gpus of values("gpus"))
    for (const checkpoint of [true, false]) for (const liger of [true, false]) {
      Object.assign(inputs.method, { value: method });
      Object.assign(inputs.optimizer, { value: optimizer });
      Object.assign(inputs.gpus, { value: gpus });
      Object.assign(inputs.checkpoint, { checked: checkpoint });
      Object.assign(inputs.liger, { checked: liger });
      inputs.method.dispatchEvent(new Event("input", { bubbles: true }));
      if (document.getElementById("fit-result").hidden) continue;
      const text = name => document.getElementById(name).textContent;
      said.push([location.hash, text("fit-command"), text("fit-arguments")]);
    }
  return said;
})()"""


@needs_browser
def test_every_command_and_script_of_the_page_has_its_options(shown: tuple[Page, str], tmp_path: Path) -> None:
    app = typer.Typer()
    liger_commands(app)
    train: Any = typer.main.get_command(app)
    opened, address = shown
    model = "Qwen/Qwen3-0.6B"
    opened.open(f"{address}#" + urlencode({"model": model, "batch": 3, "sequence": 640}))
    said = opened.value(EVERY)
    assert len(said) >= 4 * 2 * len(MODELS[model]) / 4
    for fragment, command, arguments in said:
        options = dict(pair.split("=") for pair in fragment[1:].split("&"))
        ranks = int(options["gpus"])
        setup = Setup(model, 3, 640, ranks=ranks, shard="fsdp2" if ranks > 1 else "none",
                      checkpoint=options["checkpoint"], liger=options["liger"], optimizer=options["optimizer"],
                      **METHODS[options["method"]])  # fmt: skip
        assert sorted(shlex.split(command)) == sorted(shlex.split(setup.command()))
        words = shlex.split(command.partition(" train ")[2])
        parameters = train.commands["train"].make_context("train", words).params
        values = {field.name: parameters[field.name] for field in fields(Setup)}
        assert setup_of(values, 1, device="cuda", ranks=ranks) == setup
        here: dict[str, Any] = {"TrainingArguments": partial(TrainingArguments, str(tmp_path), use_cpu=True)}
        names = "torch AutoModelForCausalLM BitsAndBytesConfig LoraConfig get_peft_model Trainer LigerCallback dataset"
        here |= dict.fromkeys(names.split(), MagicMock())
        exec(arguments, here)
        made = here["args"]
        expected = techniques.arguments(setup)
        assert all(getattr(made, name) == expected[name] for name in ("bf16", "optim") if name in expected)
        assert (made.per_device_train_batch_size, made.gradient_checkpointing) == (3, setup.checkpoint == "full")
        assert bool(made.fsdp) == (ranks > 1)


@needs_browser
def test_the_page_estimates_tokens_per_second(shown: tuple[Page, str]) -> None:
    opened, address = shown
    model, name = "Qwen/Qwen3-0.6B", "lora/full/all/none"
    per_token, per_square = MODELS[model][name]["work"]
    expected = EXAMPLES[141][1] * SPEED["shares"]["all"] / (per_token + per_square * 2048)
    row = "[...document.querySelectorAll('#fit-cards tr')].find(row => row.innerText.startsWith('141')).innerText"
    for batch, sign in ((4, "≈"), (1, "≤")):
        opened.open(f"{address}#" + urlencode({"model": model, "batch": batch}))
        said = str(opened.value(row)).split("\t")[-1]
        assert said[0] == sign
        assert float(said[2:].replace(",", "")) == pytest.approx(expected, rel=0.06)
    assert f"{SPEED['rows']} measured runs" in text(opened, "fit-speed")


def test_the_share_of_the_peak_is_that_of_the_measured_runs(generators: Any) -> None:
    assert generators.fits.speed() == SPEED


def drop(name: str, content: str) -> str:
    """A script that drops a file on the page."""
    return f"""(() => {{
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File([{json.dumps(content)}], {json.dumps(name)}));
      document.dispatchEvent(new DragEvent("drop", {{ dataTransfer, cancelable: true }}));
    }})()"""


def wait_for(opened: Page, script: str) -> None:
    # The page has answered when the browser has run what it has waited for.
    for _ in range(200):
        if opened.value(script):
            return
    raise AssertionError(opened.value("document.body.innerText"))


@contextmanager
def serving(plan: Any) -> Iterator[str]:
    with server(page({"tiny": {}}, served=True), plan) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}"
        finally:
            served.shutdown()
            thread.join()


@needs_browser
def test_a_config_that_is_dropped_on_the_served_page_is_planned(shown: tuple[Page, str]) -> None:
    seen = []

    def plan(name: str, config: str | None) -> dict[str, Any]:
        seen.append((name, config))
        if name.startswith("lora/none"):
            raise OptionError("train: some reason")
        curve: dict[str, Any] = MODELS["Qwen/Qwen3-0.6B"][name]
        return curve

    opened, _ = shown
    with serving(plan) as address:
        opened.open(address)
        wait_for(opened, "!document.getElementById('fit-result').hidden")
        opened.value(drop("photo.json", "[1]"))
        wait_for(opened, "document.getElementById('fit-problem').textContent.startsWith('photo.json must be')")
        config = json.dumps({"model_type": "qwen3", "name": "ü"})
        opened.value(drop("config.json", config))
        wait_for(opened, "document.getElementById('fit-command').textContent.includes('path/to/qwen3')")
        assert seen == [("lora/full/all/none", None), ("lora/full/all/none", config)]
        opened.value("document.forms[0].checkpoint.click()")
        wait_for(opened, "document.getElementById('fit-missing').textContent === 'train: some reason'")


@needs_browser
def test_a_config_that_is_dropped_on_the_static_page_needs_the_server(shown: tuple[Page, str]) -> None:
    opened, address = shown
    opened.open(address)
    assert opened.value("document.forms[0].config.parentElement.hidden")
    opened.value(drop("config.json", "{}"))
    assert "--serve" in text(opened, "fit-problem")


def test_the_page_and_its_data_are_small_and_need_no_network() -> None:
    whole = page(MODELS)
    assert max(len((GENERATED / "fits.json").read_text()), len(script(MODELS))) <= 1 << 20
    assert "http://" not in whole
    assert "https://" not in whole


def test_the_page_is_served_on_this_machine_and_no_other_site_can_ask_it() -> None:
    with serving(lambda name, config: {"problem": name}) as address:
        with urllib.request.urlopen(address) as answer:
            assert b"Will it fit?" in answer.read()
        body = json.dumps({"name": "some name", "config": None}).encode()
        asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer) == {"problem": "some name"}
        # A form of another site can send this type.
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "text/plain"}))
    assert address.startswith("http://127.0.0.1:")
