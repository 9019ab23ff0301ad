"""Triton kernels for packed prefixes, each beside the plain function that defines it, and the engine made of them."""
