# SPDX-License-Identifier: Apache-2.0
"""A page in a Chromium without a window, through the DevTools protocol on a pipe."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
# The codes of keys that tests press.
KEYS = {"Tab": 9, "ArrowUp": 38, "ArrowDown": 40, " ": 32}


class Page:
    """One page of the browser."""

    def __init__(self, commands: int, answers: Any) -> None:
        self.commands, self.answers, self.session, self.last = commands, answers, "", 0
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")

    def send(self, method: str, **options: Any) -> Any:
        """Send a command, and return its result."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": options}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.last:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, address: str, *, width: int = 1200, height: int = 1300, scheme: str = "light") -> None:
        """Load a page in a window of this size, and wait until it is loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        # An address that differs only after # would not load again.
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        while self.value("document.readyState + location") != "complete" + self.value("String(location)"):
            pass

    def value(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        return self.send("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=KEYS[key], **text)

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            text += byte
        return json.loads(text)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Yield a page of a browser with a fresh profile in this folder."""
    (commands_out, commands_in), (answers_out, answers_in) = os.pipe(), os.pipe()

    def connect() -> None:
        # Chromium reads commands from 3, and answers on 4; both may be among the numbers of the pipes.
        copies = os.dup(commands_out), os.dup(answers_in)
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    words = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, preexec_fn=connect, close_fds=False, stdout=quiet, stderr=quiet)
    os.close(commands_out)
    os.close(answers_in)
    try:
        with os.fdopen(answers_out, "rb") as answers:
            yield Page(commands_in, answers)
    finally:
        with suppress(OSError):
            os.close(commands_in)
        process.terminate()
        process.wait(timeout=30)
