# SPDX-License-Identifier: Apache-2.0
"""The page that answers whether a setup fits: its data, and a server on this machine."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from liger_core.errors import LigerError, OptionError
from liger_train.plan.ledger import CATEGORIES, COLORS
from liger_train.setup import Setup
from liger_train.techniques import check

METHODS: dict[str, dict[str, Any]] = {
    "qlora": {"adapter": "qlora"},
    "lora": {"adapter": "lora"},
    "bf16": {"precision": "bf16-pure"},
    "full": {"precision": "bf16"},
}
# GB of a card as it is sold → GiB that PyTorch can allocate on it: without half a GiB for CUDA, and without what error
# correction takes.
CARDS = {24: 23.0, 32: 31.0, 48: 44.0, 80: 78.0, 96: 94.0, 141: 139.0, 192: 178.0}
# GB of a card → one of that size, and the operations per second of its dense matmuls in bfloat16, by its data sheet.
EXAMPLES = {
    24: ("RTX 4090", 165e12),
    32: ("RTX 5090", 209e12),
    48: ("L40S", 362e12),
    80: ("H100", 989e12),
    96: ("RTX PRO 6000", 503e12),
    141: ("H200", 989e12),
    192: ("B200", 2250e12),
}
GPUS = (1, 2, 4, 8)
FILES = files("liger_train.plan") / "page"
LARGEST_CONFIG = 1 << 20


def setups(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield every combination on the page that a GPU can train the model with, and its name."""
    for shard, liger, checkpoint, method in product(("none", "fsdp2"), ("all", "none"), ("full", "none"), METHODS):
        name = "/".join((method, checkpoint, liger, shard))
        with suppress(OptionError):
            yield name, combination(setup, name)


def combination(setup: Setup, name: str) -> Setup:
    """Return the setup with the options of a combination on the page; raises OptionError if no GPU can train it."""
    method, checkpoint, liger, shard = name.split("/")
    options: Any = METHODS[method] | {"ranks": 1 if shard == "none" else GPUS[1]}
    changed = replace(setup, device="cuda", liger=liger, checkpoint=checkpoint, shard=shard, **options)
    check(changed, here=False)
    return changed


def curve(setup: Setup) -> dict[str, Any]:
    """Return what the page knows of a combination: its peaks, and the operations of a step."""
    from liger_train.plan.estimate import work
    from liger_train.plan.peaks import peaks

    return peaks(setup).columns() | {"work": [round(operations) for operations in work(setup)]}


def curve_of_config(setup: Setup, name: str, config: str | None) -> dict[str, Any]:
    """Return the curve of a combination for a setup's model, or for the text of a config.json instead."""
    if config is None:
        return curve(combination(setup, name))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return curve(combination(replace(setup, model=folder, trust_remote_code=False), name))


def script(models: dict[str, Any], *, served: bool = False) -> str:
    """Return the data of the page as JavaScript; `models` has the curves of each. A server plans what is missing."""
    data = {
        "models": models,
        "served": served,
        "cards": CARDS,
        "examples": EXAMPLES,
        "gpus": GPUS,
        "categories": CATEGORIES,
        "colors": COLORS,
        "speed": json.loads((FILES / "speed.json").read_text()),
    }
    return f"window.LIGER_FIT = {json.dumps(data, separators=(',', ':'))};\n"


def page(models: dict[str, Any], *, served: bool = False) -> str:
    """Return the page as one file, for these models."""
    style, body, code = ((FILES / name).read_text() for name in ("fit.css", "fit.html", "fit.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Will it fit?</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n'
        ":root { color-scheme: light dark; }\n"
        "body { font: 16px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 60rem; padding: 0 1rem; }\n"
        "pre { background: #8882; overflow-x: auto; padding: 0.75rem; }\n"
        f"{style}</style></head><body>\n<h1>Will it fit?</h1>\n{body}"
        f"<script>{script(models, served=served)}</script>\n<script>{code}</script></body></html>\n"
    )


def server(text: str, plan: Callable[[str, str | None], dict[str, Any]]) -> HTTPServer:
    """Return a server of a page for this machine only, at a free port.

    `plan` gets the name of a combination, and the text of a config or None, and returns a curve.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send("text/html", text)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            # Another site's page cannot send this type without permission.
            if self.headers.get("Content-Type") != "application/json" or length > LARGEST_CONFIG:
                self.send_error(400)
                return
            wanted = json.loads(self.rfile.read(length))
            try:
                answer = plan(wanted["name"], wanted["config"])
            except Exception as problem:  # A config can fail anywhere in Transformers.
                first = str(problem).strip().partition("\n")[0]
                answer = {"problem": first if isinstance(problem, LigerError) else f"{type(problem).__name__}: {first}"}
            self._send("application/json", json.dumps(answer))

        def _send(self, kind: str, body: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    return HTTPServer(("127.0.0.1", 0), Handler)
