"""Triton kernels for packed prefixes, each beside the plain function that defines it.

Numbers of rows, prefixes, heads and tiles are not specialised on: Triton would compile each kernel
again for those that are 1 or a multiple of 16. Widths are, because aligned rows are loaded in
larger pieces.
"""
