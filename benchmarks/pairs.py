# SPDX-License-Identifier: Apache-2.0
"""Measure pairs of things to compare, each in a process of its own."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable


def measure_each(
    parser: argparse.ArgumentParser,
    pairs: Callable[[argparse.Namespace], Iterable[tuple[str, str]]],
    measure: Callable[[argparse.Namespace, str, str], None],
) -> None:
    """Start this script again for each pair; exit with 1 if one of them fails, which does not stop the others."""
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        measure(args, *args.alone)
        return
    words = [sys.executable, *sys.argv, "--alone"]
    codes = [subprocess.run([*words, *pair]).returncode for pair in pairs(args)]
    sys.exit(any(codes))
