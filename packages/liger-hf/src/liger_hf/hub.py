# SPDX-License-Identifier: Apache-2.0
"""Check whether models can be downloaded here."""

from functools import cache
from pathlib import Path
from threading import Thread

# The timeout of a request, also if the name server does not answer.
SECONDS = 3.0
UNREACHABLE = "no such folder, and the hub cannot be reached"


def is_local(name: str) -> bool:
    """Return whether only local files can be loaded: a folder, or the cache.

    Without this check, the libraries retry for most of a minute.
    """
    return Path(name).exists() or not hub_is_reachable()


@cache
def hub_is_reachable() -> bool:
    """Return whether the hub answers a single request with a short timeout."""
    answers: list[object] = []
    request = Thread(target=_ask, args=(answers,), daemon=True)
    request.start()
    request.join(SECONDS)
    return bool(answers)


def _ask(answers: list[object]) -> None:
    from huggingface_hub import constants, get_session

    # The HTTP library of the session, and thus the exceptions it raises, depend on the version of huggingface_hub.
    try:
        answers.append(get_session().head(constants.ENDPOINT, timeout=SECONDS))
    except Exception:
        return
