# SPDX-License-Identifier: Apache-2.0
"""Whether the hub can be reached is found out with any version of huggingface_hub, and within seconds."""

import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from liger_hf import hub
from liger_hf.hub import hub_is_reachable

pytestmark = pytest.mark.cpu


class Refusing(BaseHTTPRequestHandler):
    """Answers that there is nothing."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *words: Any) -> None:
        """Says nothing."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """endpoint(url): sets where the hub is, and forgets whether it was reachable."""
    hub_is_reachable.cache_clear()
    yield lambda url: monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    hub_is_reachable.cache_clear()


def test_a_hub_that_answers_is_reachable_whatever_the_answer(endpoint: Callable[[str], None]) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request, daemon=True).start()
        endpoint(f"http://127.0.0.1:{server.server_port}")
        assert hub_is_reachable()


@pytest.mark.parametrize("listens", [False, True], ids=["closed_port", "no_answer"])
def test_a_port_that_does_not_answer_is_not_a_hub_and_not_waited_for(
    listens: bool, endpoint: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.2 if listens else hub.SECONDS)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if listens:
            port.listen()
        endpoint(f"http://127.0.0.1:{port.getsockname()[1]}")
        assert not hub_is_reachable()
