# SPDX-License-Identifier: Apache-2.0
"""Whether models can be downloaded here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from threading import Thread

# For an answer; a name server that does not answer is not waited for any longer either.
SECONDS = 3.0
UNREACHABLE = "no such folder, and the hub cannot be reached"


def is_local(name: str) -> bool:
    """Whether only local files can be loaded: a folder, or the cache.

    Without this check, the libraries retry for most of a minute.
    """
    return Path(name).exists() or not hub_is_reachable()


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers a single request with a short timeout; the libraries retry for most of a minute."""
    answers: list[object] = []
    asking = Thread(target=_ask, args=(answers,), daemon=True)
    asking.start()
    asking.join(SECONDS)
    return bool(answers)


def _ask(answers: list[object]) -> None:
    from huggingface_hub import constants, get_session

    # The HTTP library of the session, and thus the exceptions it raises, depend on the version of huggingface_hub.
    try:
        answers.append(get_session().head(constants.ENDPOINT, timeout=SECONDS))
    except Exception:
        return
