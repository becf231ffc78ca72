"""Sizes that change: one program for a range of sizes.

A compiled graph with open sizes is traced with padded arrays, as large as a *bound* for each size; the true sizes are
run-time operands. What lies beyond a true size is garbage, and every operator that would let it reach what does not is
given a mask, so results are those of the unpadded run.
"""
