# SPDX-License-Identifier: Apache-2.0
"""The private names of other libraries, each with its purpose and a fallback for versions without it.

liger_core/private_torch.py has those of torch and liger_hf/private_transformers.py those of Transformers and the
libraries around it. No other file uses a private name, so a release that drops one costs speed or a feature, but never
the import. docs/private-names.md is generated from these descriptions.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


@contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object within this context, if it exists."""
    original = vars(owner).get(name)
    if original is not None:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, name, original)


class PrivateName(NamedTuple):
    """One private name.

    path      "module:name", or "module:word" for a word in the source of a module, such as an attribute that it sets;
              one that ends with an underscore is a prefix
    purpose   what it is used for
    fallback  what happens without it
    is_word   whether the path names a word
    """

    path: str
    purpose: str
    fallback: str
    is_word: bool = False

    @property
    def title(self) -> str:
        """Return the name as a page shows it."""
        module, _, name = self.path.partition(":")
        return f"{name} (in {module})" if self.is_word else f"{module}.{name}"

    def exists(self) -> bool:
        """Whether the installed version has it."""
        module, _, name = self.path.partition(":")
        if self.is_word:
            return re.search(rf"(?<!\w){name}" + ("" if name.endswith("_") else r"(?!\w)"), _source(module)) is not None
        try:
            pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError):
            return False
        return True


class Absent:
    """A stand-in for a missing function or class: it is false, and calling it raises RuntimeError."""

    def __init__(self, name: PrivateName) -> None:
        self.name = name

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        library = self.name.path.partition(":")[0].partition(".")[0]
        raise RuntimeError(
            f"{self.name.purpose.removesuffix('.')}: {library} must have {self.name.title}, got {library} "
            f"{version(library)} without it; use a version that docs/private-names.md lists"
        )


class PrivateNames(dict[str, PrivateName]):
    """The private names that one module looks up, by path."""

    def look_up(self, path: str, purpose: str, without: str, fallback: Any) -> Any:
        """Return what a path names, or the fallback."""
        self[path] = PrivateName(path, purpose, without)
        try:
            return pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            return fallback

    def require(self, path: str, purpose: str) -> Any:
        """Return what a path names, or a stand-in that raises RuntimeError when it is called."""
        name = PrivateName(path, purpose, "An error when it is used.")
        return self.look_up(path, purpose, name.fallback, Absent(name))

    def look_up_later(self, path: str, purpose: str, without: str, fallback: Any) -> Callable[[], Any]:
        """Return a function that looks a path up at its first call: importing its module takes long."""
        self[path] = PrivateName(path, purpose, without)
        return cache(lambda: self.look_up(path, purpose, without, fallback))

    def word(self, path: str, purpose: str, without: str) -> str:
        """Return the word of a path "module:word".

        In other versions, code that looks for it in an object finds nothing.
        """
        self[path] = PrivateName(path, purpose, without, is_word=True)
        return path.partition(":")[2]


@cache
def _source(module: str) -> str:
    """Return the source of a module, or an empty string if it is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return ""
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
