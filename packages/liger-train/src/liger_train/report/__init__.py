# SPDX-License-Identifier: Apache-2.0
"""`liger report`: the seed's figures and tables from the results of `liger train`, and nothing that is not in them."""
