"""Generates from the command line: `python -m models.generate --model tiny-vl "What is in this picture?" --image F`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from models.cache import CACHE_TYPES
from models.errors import KestrelError
from models.freed_memory import keep_freed_memory
from models.generation import Step
from models.images import open_image
from models.model import LoadedModel, load
from models.quantisation import SCHEMES
from models.sampling import SamplingParams


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.generate", description=__doc__.split(":")[0] + ".")
    parser.add_argument("prompt", help="the question")
    parser.add_argument("--model", default="tiny-vl", help="a checkpoint folder, tiny-vl, tiny-moe, or a preset")
    parser.add_argument("--weights", choices=["random"], help="random weights; a preset has no others")
    parser.add_argument("--quant", choices=sorted(SCHEMES), help="quantise the weights; without: as they are stored")
    parser.add_argument("--kv", choices=CACHE_TYPES, help="how keys and values are kept")
    parser.add_argument("--copy-weights", action="store_true", help="copy a converted folder's weights to huge pages")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="how matrices are kept")
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help="may be repeated")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-context", type=int, help="tokens of prompt and answer together")
    parser.add_argument("--max-image-tokens", type=int, default=1280)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", action="store_true", help="a line per token: text, log-probability, margin")
    return parser.parse_args(arguments)


def conversation(options: argparse.Namespace) -> list[dict[str, object]]:
    """The messages that the options describe; pictures come before the question."""
    pictures = [{"type": "image", "image": open_image(file.read_bytes())} for file in options.image]
    messages = [{"role": "user", "content": [*pictures, {"type": "text", "text": options.prompt}]}]
    return [{"role": "system", "content": options.system}, *messages] if options.system else messages


def print_steps(model: LoadedModel, options: argparse.Namespace) -> None:
    """Streams the answer to standard output, and a summary to standard error."""
    sampling = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
    )
    start = time.perf_counter()
    times = []
    for step in model.generate(
        conversation(options), max_tokens=options.max_tokens, stop=options.stop, sampling=sampling
    ):
        times.append(time.perf_counter() - start)
        print(_line(step) if options.steps else step.text, end="", flush=True)
    rest = (times[-1] - times[0]) / max(len(times) - 1, 1)
    print()
    print(
        f"{len(times)} tokens, {step.finish_reason}; first after {times[0] * 1e3:.0f} ms (compiling included), "
        f"then {rest * 1e3:.1f} ms per token",
        file=sys.stderr,
    )


def _line(step: Step) -> str:
    return f"{step.token_id:>7} {step.text!r:<16} logprob {step.logprob:8.4f}  margin {step.margin:8.4f}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 2 is the exit status of anything the user can put right."""
    options = parse_arguments(arguments)
    keep_freed_memory()
    try:
        model = load(
            options.model,
            quant=options.quant,
            kv=options.kv,
            mapped=not options.copy_weights,
            dtype=options.dtype,
            weights=options.weights,
            max_context=options.max_context,
            max_image_tokens=options.max_image_tokens,
        )
        print_steps(model, options)
    except (KestrelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
