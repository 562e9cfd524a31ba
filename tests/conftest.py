"""Strict array semantics for every test: silent dtype or rank promotion is an error."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
