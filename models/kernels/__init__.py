"""The operations that XLA on CPU is too slow at: products with quantised weights, and attention over a long cache.

`ops` holds them as functions on JAX arrays. Each has a compiled form (C++ under XLA's foreign function interface:
`variant.cc` the arithmetic, `ffi.cc` the custom calls) and a form in plain JAX of the same arithmetic (`reference`),
which takes its place where the compiled one cannot be had.
"""
