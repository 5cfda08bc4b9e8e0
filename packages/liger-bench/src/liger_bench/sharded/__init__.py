# SPDX-License-Identifier: Apache-2.0
"""`liger bench sharded`: heads whose vocabulary is sharded over ranks."""
