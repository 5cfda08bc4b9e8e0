# SPDX-License-Identifier: Apache-2.0
"""`python -m liger_core` is the command `liger`, even if no script is installed."""

from liger_core.commands import main

if __name__ == "__main__":
    main()
