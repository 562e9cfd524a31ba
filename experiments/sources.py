"""The documents of the original that several experiments take figures from, as reports name them."""

BASELINE = "docs of the original, baseline report of 2026-09-05"
CACHE = "docs of the original, KV cache v2"
GUESSES = "docs of the original, bottlenecks of speculative decoding"
N1 = "docs of the original, report on 64 Neoverse-N1 cores"
SETTINGS = "docs of the original, optimised settings"
TECHNICAL = "docs of the original, technical document"
