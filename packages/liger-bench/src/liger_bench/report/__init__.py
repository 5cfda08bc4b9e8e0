# SPDX-License-Identifier: Apache-2.0
"""`liger bench report`: pictures and one page from the files of results, and nothing that is not in them."""
