"""Documented figures that no experiment is about, and why not, by what they are about.

With them the report tells of every figure of the articles, and of those sections of the original's documents that the
experiments go by.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.sources import BASELINE, CACHE, GUESSES, N1, SETTINGS, TECHNICAL

ARTICLES = "articles 14-2 and 20-1"
BOUNDARY = "docs of the original, technical document and changelog"
MATRIX = "docs of the original, matrix of 2026-09-12"
CHANGELOG = "docs of the original, changelog"


@dataclass(frozen=True)
class NotMeasured:
    """A documented figure as printed, where it is printed, and why nothing here is set beside it."""

    what: str
    printed: str
    source: str
    why: str


THE_PROGRAM = (
    NotMeasured(
        "size of the program",
        "0.8 MB",
        "title of the articles",
        "a C program against a Python one, whose libraries are hundreds of times as large",
    ),
    NotMeasured(
        "workers of the HTTP server",
        "8",
        ARTICLES,
        "a setting, not a measurement: connections wait here without a thread each, and backlog tells how many can",
    ),
    NotMeasured(
        "start of the program until a 2B model is loaded, against llama.cpp",
        "2.01 against 5.02 s",
        BASELINE,
        "another file format, read by another program; experiments.bench_open tells what opening takes here",
    ),
    NotMeasured(
        "loading of a 2B model",
        "1,175, 1,018 and 1,263 ms",
        BASELINE,
        "another file format; experiments.bench_open tells what opening takes here",
    ),
    NotMeasured(
        "resident memory of a 2B model with 64 tokens generated, against llama.cpp",
        "2,466 against 3,027 MB",
        BASELINE,
        "depends on what is mapped and what is copied; residency and quantisation tell the memory of the models here",
    ),
)
CONTEXT = (
    NotMeasured(
        "whole answer of 64 tokens at 1K, 2K, 4K and 8K",
        "26.6-27.3, 56.1-56.6, 118.8-120.8 and 233.6-235.0 s; llama.cpp 18.7-19.2, 36.9, 88.3 and 235.9 s",
        BASELINE,
        "the time of the prompt and 64 times that of a token, both of which context_growth has",
    ),
    NotMeasured(
        "times as fast per token as llama.cpp at 1K, 4K and 8K",
        "1.4, 2.1 and 3.0",
        BASELINE,
        "llama.cpp was run beside this project at 256 and 2048 tokens; context_growth tells of the latter",
    ),
    NotMeasured(
        "rate of prompts against llama.cpp at 1K to 8K",
        "53 against 84 tokens/s at 1K, 40 against 38 at 8K",
        BASELINE,
        "llama.cpp was run beside this project with prompts of 24 and 512 tokens (experiments.bench_prefill)",
    ),
    NotMeasured(
        "shares of matrix products and attention in a prompt's time",
        "51 and 46 % at 4K, 46 to 51 and 51 % at 8K",
        BASELINE,
        "XLA's trace was read for decode steps only (experiments.bench_decode --profile)",
    ),
    NotMeasured(
        "prompt of 9 tokens, 2B q8",
        "480-520 ms, about 18 tokens/s",
        TECHNICAL,
        "context_growth and quantisation time prompts of 256 tokens and more; experiments.bench_prefill has 24",
    ),
)
NUMERICS = (
    NotMeasured(
        "rows of the cache that depend on the chunk width, partial variant",
        "3554 of 3554",
        BOUNDARY,
        "what was partial is not stated; prefill_width tells of the whole variant",
    ),
    NotMeasured(
        "rows that differ in a batch of 3 on the way to exact speculation, by layer",
        "0 of 33 in layer 0, 32 to 33 of 33 in all others",
        GUESSES,
        "with this project's kernels no row differs in any layer (batch_margin, prefill_width), so that layers need "
        "not be told apart",
    ),
    NotMeasured(
        "identical answers to identical requests, several threads",
        "40 of 40",
        BOUNDARY,
        "batch_margin asks one prompt again under changing load, and threads with every number of threads",
    ),
)
THREADS = (
    NotMeasured(
        "times for absolute numbers of threads on 64 Neoverse-N1 cores",
        "8B: a prompt of 502 tokens 72.3 s with 1 thread, 2.49 s with 64; a token 619 and 54 ms; 30B-A3B likewise",
        N1,
        "no such machine; threads tells the ratios",
    ),
    NotMeasured(
        "gains of 30B-A3B on 64 Neoverse-N1 cores",
        "prompts 18.6 times with 32 threads, 29.3 with 64; decoding 8.7 times with 32, 7.3 with 64",
        N1,
        "no such machine; threads has them in its table as far as it has as many threads",
    ),
    NotMeasured(
        "best number of threads for decoding, 8B",
        "40 to 48 of 64, 35 ms",
        N1,
        "no such machine; threads draws the curve",
    ),
    NotMeasured(
        "all weights against layer by layer, 30B-A3B with 32 to 64 threads",
        "109.5 -> 387 to 130.5 -> 437 ms per token, 13,602 -> 486 to 556 MB",
        N1,
        "no such machine; residency measures the same change with the cores that there are",
    ),
    NotMeasured(
        "sparse attention at 4096 tokens, 30B-A3B with 32 threads",
        "133 -> 127 ms per token, 9 of 32 tokens differ",
        N1,
        "there is no sparse attention here",
    ),
    NotMeasured(
        "512 x 512 picture with 8 threads instead of 4 on the board",
        "47 instead of 21.7 s",
        TECHNICAL,
        "a matter of the board's slow cores, which threads shows with prompts and tokens",
    ),
)
FORMATS = (
    NotMeasured(
        "time per token, 8B with 16 threads",
        "130 ms",
        SETTINGS,
        "an absolute time of an x86 machine that is not named",
    ),
    NotMeasured(
        "mode dual in general, switched on",
        "+1.8 %; prompts +2.4 %",
        SETTINGS,
        "of what the 1.8 % are is not stated; quantisation compares the two formats that the mode combines",
    ),
    NotMeasured(
        "file of a 2B model, a third format",
        "2.33 GB",
        "docs of the original, a converter's log",
        "which format it has is not stated; quantisation and scaling_model tell of the two other files, 3.19 and 4.16 "
        "GB",
    ),
    NotMeasured(
        "formats of the weights other than q4 and q8",
        "q4i, g256; q2mix: 0.66 of the answer in Chinese with a tail of 28 layers in q4, 0.11 with one of 12",
        SETTINGS,
        "they do not exist here",
    ),
)
REUSE = (
    NotMeasured(
        "second turn at 8K tokens, and after a restart with a short context",
        "14.6 times as fast as the first; 1,328 against 285 ms, 4.66 to 5.27 times",
        BASELINE,
        "prefix_reuse measures both at lengths between these",
    ),
    NotMeasured(
        "second turn of llama.cpp, and what is new in it",
        "3.34 and 6.63 s at 4K and 8K; the original 2.0 s for 29 new tokens, 7.9 and 13.8 s to the first token",
        BASELINE,
        "prefix_reuse times the second turn as a whole, without llama.cpp beside it",
    ),
    NotMeasured(
        "writing of a snapshot at 8K, and start of the program before it is read",
        "16 s and 1.0 s",
        BASELINE,
        "prefix_reuse times the first token after a restart, with the reading in it; the writing happens after an "
        "answer",
    ),
    NotMeasured(
        "third turn, 2B",
        "6,545 -> 972 ms",
        MATRIX,
        "prefix_reuse measures second turns; a third is reused in the same way, from a longer beginning",
    ),
    NotMeasured(
        "second turns of larger models",
        "8B 19,251 -> 1,885 ms; 30B-A3B 722,394 -> 28,633 ms, and 4,727 ms with int8 activations",
        MATRIX,
        "prefix_reuse measures the 2B shape, and takes larger ones with --model",
    ),
    NotMeasured(
        "tokens of a beginning that several users share",
        "384 at the root and 512 deeper, for 4 and 4 users",
        SETTINGS,
        "lengths of a test without a time of its own; prefix_reuse shares a system prompt of 231 tokens",
    ),
)
CACHE_PRECISION = (
    NotMeasured(
        "negative log-likelihood of each passage, int8 against float32 history",
        "one passage 2.8212 -> 2.9376; P0 3.7035 -> 3.7932, P1 3.8379 -> 3.7231, P3 2.5877 -> 2.4213, mean 3.7267 -> "
        "3.6474 nats",
        CACHE,
        "the passages are not published, and their nats are those of real weights; kv_precision tells by how much nats "
        "rise",
    ),
    NotMeasured(
        "resident memory with int8 alone",
        "-22 %",
        CACHE,
        "of a whole process of another make; kv_precision tells the bytes of a cached token",
    ),
    NotMeasured(
        "rate of long prompts, four ways of keeping the cache",
        "50.2, 50.9, 43.6 and 44.2 tokens/s",
        CACHE,
        "the four ways are the original's; here a cache has one type, of which kv_precision times decoding",
    ),
    NotMeasured(
        "first token of the next turn, four ways of keeping the cache",
        "5.78, 5.60, 34.3 and 34.3 s",
        CACHE,
        "two of them reuse nothing; prefix_reuse measures with reuse and without",
    ),
    NotMeasured(
        "time per token with pages of the cache taken as they are written",
        "214 against 266 ms with layers dropped besides",
        CACHE,
        "the cache here is always taken as it is written; residency times dropped layers",
    ),
    NotMeasured(
        "memory when a model is opened, with the cache taken at once and as it is written",
        "2.46 GB and 13.9 MB",
        CACHE,
        "the cache here is always taken as it is written, so there is nothing to compare",
    ),
    NotMeasured(
        "4-bit cache",
        "1.65 times smaller than int8 with float32",
        TECHNICAL,
        "there is no 4-bit cache here",
    ),
    NotMeasured(
        "conversation of 20 turns about a picture with int8 alone",
        "first token 23.4 against 22.1 s, 1.73 against 1.94 GB, 6 of 7 answers right in both",
        CACHE,
        "mixed with the gains of sparse attention and eviction, which do not exist here; the answers need real weights",
    ),
)
GUESSING = (
    NotMeasured(
        "exact checks of 3 guesses, 8B q4",
        "213.0 ms per token against 188.9",
        GUESSES,
        "speculation compares with the exact checks of 8 guesses; here the fast checks are exact, so that there is no "
        "second way",
    ),
    NotMeasured(
        "answers generated again after guessing, 8B q4",
        "332.2 ms per token",
        GUESSES,
        "nothing needs to be generated again here",
    ),
    NotMeasured(
        "time per token of checking several guesses at once, against one by one",
        "17 against 72 ms",
        GUESSES,
        "speculation tells what it comes to for a whole answer",
    ),
    NotMeasured(
        "tokens of an answer with guesses and without, before the fix",
        "90 and 86",
        BOUNDARY,
        "a mistake of the original that it mended; speculation compares every answer",
    ),
    NotMeasured(
        "guesses by a trained draft head",
        "120.5 against 39.2 ms per token, 1.73 tokens accepted",
        GUESSES,
        "there is no draft model here",
    ),
    NotMeasured(
        "time of a draft head, and of the output matrix in it",
        "79.7 and 48.6 ms",
        GUESSES,
        "there is no draft model here",
    ),
    NotMeasured(
        "tokens accepted of a tree of guesses, and right first guesses, of a trained draft head",
        "2.02 and 47.9 %",
        GUESSES,
        "there is no draft model here",
    ),
    NotMeasured(
        "guessing in general, switched on",
        "2.4 times as slow on x86, 15 to 45 % slower with 8B q8 on the board",
        GUESSES,
        "on which texts is not stated; speculation tells the gain by the share of right guesses",
    ),
)
RESIDENCY = (
    NotMeasured(
        "peak of the process's memory, all weights over dropped, served",
        "2B 3.5, 8B 4.9, 30B-A3B 12.8 times",
        MATRIX,
        "with a server's buffers and its cache in it; residency tells of the weights alone",
    ),
    NotMeasured(
        "2B served with 300 tokens and 32, 8 threads",
        "113.0 -> 156.7 ms per token; prompts 5,267 -> 5,441 ms warm, 13,993 -> 14,882 ms cold",
        MATRIX,
        "residency runs the other documented configuration, 32 tokens and 32; its --prompt 300 comes near this one",
    ),
    NotMeasured(
        "larger models with 8 threads, page cache dropped before",
        "8B 429 -> 586 ms per token, prompts 73.39 and 72.48 s; 30B-A3B 2,442 -> 2,840 ms, 273.6 and 273.3 s",
        MATRIX,
        "needs these models; the later changelog has 4 threads and a warm page cache, which is what residency compares",
    ),
    NotMeasured(
        "8 threads, page cache warm and dropped, after the changes of the changelog",
        "8B 468 -> 582 ms warm, 469 -> 588 ms cold; 30B-A3B 986 -> 1,387 ms cold",
        CHANGELOG,
        "likewise",
    ),
)
BATCHING = (
    NotMeasured(
        "batching in general, switched on",
        "+4.5 %",
        SETTINGS,
        "of what is not stated",
    ),
)
NOT_MEASURED = (
    *THE_PROGRAM,
    *CONTEXT,
    *NUMERICS,
    *THREADS,
    *FORMATS,
    *REUSE,
    *CACHE_PRECISION,
    *GUESSING,
    *RESIDENCY,
    *BATCHING,
)
