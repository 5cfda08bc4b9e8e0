# SPDX-License-Identifier: Apache-2.0
"""`liger bench`: time, memory and accuracy of every op, from the op's own description."""
