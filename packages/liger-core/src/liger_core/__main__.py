# SPDX-License-Identifier: Apache-2.0
"""`python -m liger_core` is the command `liger`, also where no script was installed."""

from liger_core.commands import main

if __name__ == "__main__":
    main()
