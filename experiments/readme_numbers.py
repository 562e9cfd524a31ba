"""The measured numbers in README.md, written from the raw data of the results that they are from.

    python -m experiments.readme_numbers

Each part stands in README.md between a mark of its own and the next `<!-- end -->`. The table of documented figures is
written by `experiments.report`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments import concurrency, parity, scaling_model, speed
from experiments.bench import OURS, ROOT, THEIRS, ratios, select
from experiments.bench_batch import ROWS, seconds
from experiments.bench_decode import floors, step_ms
from experiments.experiment import Raw, Sample, of
from experiments.soak_overhead import pooled
from experiments.soak_report import LEAK_MB, Memory
from models.qwen_vocabulary import QWEN_VOCABULARY

README, RESULTS = ROOT / "README.md", ROOT / "results"
BEGIN, END = "<!-- written by experiments.readme_numbers: {} -->\n", "<!-- end -->\n"
WIDTH = 125


@dataclass(frozen=True)
class Step:
    """A row of the table of decode steps: a cell of `experiments.speed` and what to call it."""

    what: str
    part: str
    quant: str
    context: int = 256


STEPS = (
    Step("Qwen3-VL-2B q4, 256 tokens in the cache", "decode-2b", "q4"),
    Step("the same, 2048 tokens", "decode-2b", "q4", 2048),
    Step("Qwen3-VL-2B q8, 256 tokens", "decode-2b", "q8"),
    Step("Qwen3-VL-8B q4, 256 tokens", "decode-8b", "q4"),
    Step("Qwen3-30B-A3B q4, 256 tokens", "decode-30b-a3b", "q4"),
)


def parity_part(results: Path) -> str:
    """The parity table, without the negative controls."""
    raw = json.loads((results / "parity" / "raw.json").read_text())
    cases = [parity.Parity(**case) for case in raw["cases"]]
    controls = [parity.ControlResult(**control) for control in raw["controls"]]
    return parity.table(cases, controls).split("\n\n")[0] + "\n"


def speed_part(results: Path) -> str:
    """Decode steps against the floor and against llama.cpp, and what else `experiments.speed` measures."""
    folder = results / "speed"
    samples = {part: lines_of(folder / part / "raw.jsonl") for part in speed.PARTS}
    return "\n".join([machine(results, samples), steps_table(samples), others(samples)])


def machine(results: Path, samples: speed.Samples) -> str:
    """What was measured on, and against what."""
    environment = json.loads((results / "speed" / "environment.json").read_text())
    rates = [max(sample["bandwidth"].values()) for part in samples.values() for sample in part if "bandwidth" in sample]
    own = median(sample["bandwidth"] for sample in of(raw_samples(results, "scaling_model"), part=scaling_model.HERE))
    return paragraph(
        f"Measured on {environment['cores']} cores ({environment['cpu']}, kernels {environment['kernels']}), with "
        "random weights at real shape and an int8 cache, in turns with llama.cpp (xllamacpp "
        f"{environment['packages']['xllamacpp']}, Q4_0 and Q8_0, f16 cache) on the same cores. The floor rests on the "
        f"bandwidth that is measured just before each turn: {median(rates):.1f} GB/s read by all cores together, "
        f"{min(rates):.1f} to {max(rates):.1f} over {len(rates)} turns. The figures on paper of "
        "[scaling_model](results/scaling_model/table.md) rest on a measurement of their own, at another time: "
        f"{own:.1f} GB/s."
    )


def steps_table(samples: speed.Samples) -> str:
    """A row for each of `STEPS`; without llama.cpp's, where it did not take part."""
    lines = ["| | ms per token | over the floor | llama.cpp, ms | ours / llama.cpp's |", "|---|---|---|---|---|"]
    for row in STEPS:
        ours, theirs = (
            speed.decode_cell(samples, row.part, row.quant, program, row.context) for program in (OURS, THEIRS)
        )
        cells = [row.what, f"{median(step_ms(ours)):.1f}", f"{median(ratios(step_ms(ours), floors(ours))):.2f}"]
        against = ratios(step_ms(ours), step_ms(theirs)) if theirs else []
        cells += [f"{median(step_ms(theirs)):.1f}", f"{median(against):.2f}"] if theirs else ["", ""]
        lines.append(" ".join(f"| {cell}" if cell else "|" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def others(samples: speed.Samples) -> str:
    """Batches, prompts and memory."""
    ours, theirs = (
        [sample["ms"] / 1e3 for sample in select(samples["prefill-2b"], tokens=512, program=program)]
        for program in (OURS, THEIRS)
    )
    memory = median(sample["resident"] for sample in samples["open-2b"]) / 1e6
    return paragraph(
        "These are medians; ratios are taken within a repeat. Of Qwen3-VL-2B q4, eight sequences decoded together give "
        f"{median(speed.batch_gain(samples)):.2f} times the tokens per second of one. A prompt of 512 tokens takes "
        f"{median(ours):.1f} s, which is {512 / median(ours):.0f} tokens/s, {median(speed.prefill_gain(samples)):.2f} "
        f"times llama.cpp's {512 / median(theirs):.0f}. Beyond weights and cache the process takes {memory:.0f} MB."
    )


def batch_part(results: Path) -> str:
    """Requests together against one after the other, in the engine and through a server; and what reuse saves."""
    samples = lines_of(results / "bench_batch" / "raw.jsonl")
    depends = "Every prompt is computed by itself, so these ratios depend on how long prompts are beside answers."
    together = f"{engine_sentence(samples)} {server_sentence(raw_samples(results, 'concurrency'))} {depends}"
    return f"{paragraph(together)}\n{reuse(samples)}"


def engine_sentence(samples: Sequence[Sample]) -> str:
    """Eight requests in the engine alone, which `experiments.bench_batch` measures."""
    answers = select(samples, part="answers")
    lengths = sorted({sample["tokens"] for sample in answers})
    [prompt] = {sample["prompt"] for sample in answers}
    serial, llama = zip(*(batch_ratios(select(answers, tokens=length)) for length in lengths), strict=True)
    return (
        f"Eight prompts of {prompt} tokens, computed together by the engine without a server, take {listed(serial)} of "
        f"the time of one after the other with answers of {listed(lengths)} tokens; of the time that llama.cpp takes "
        f"with eight slots, {listed(llama)} ([bench_batch](results/bench_batch/table.md))."
    )


def server_sentence(samples: Sequence[Sample]) -> str:
    """Eight clients of a server, which `experiments.concurrency` measures."""
    lengths = sorted({sample["cell"]["tokens"] for sample in samples})
    over = [median(concurrency.over_serial(samples, concurrency.BATCHED, length)) for length in lengths]
    return (
        f"Eight short questions that clients ask a server with `--batch-max 8` at once take {listed(over)} of the time "
        f"of one after the other with answers of {listed(lengths)} tokens "
        "([concurrency](results/concurrency/table.md))."
    )


def batch_ratios(samples: Sequence[Sample]) -> tuple[float, float]:
    """Of requests with answers of one length: the time together over one after the other, and over llama.cpp's."""
    chosen = ((OURS, ROWS), (OURS, 1), (THEIRS, ROWS))
    together, serial, theirs = (seconds(select(samples, program=program, rows=rows)) for program, rows in chosen)
    return median(ratios(together, serial)), median(ratios(together, theirs))


def reuse(samples: Sequence[Sample]) -> str:
    """How soon an answer begins whose prompt goes on from one before."""
    turns, pictures = select(samples, part="turns"), select(samples, part="picture")
    [length] = {sample["conversation"] for sample in turns}
    (first, second), (new, seen) = (
        [median(sample[name] for sample in chosen) / 1e3 for name in ("first_ms", "second_ms")]
        for chosen in (turns, pictures)
    )
    return paragraph(
        f"The answer to a first turn of {length:,} tokens begins after {first:.1f} s, that to the second turn after "
        f"{second:.2f} s; the answer to a question about a new picture after {new:.1f} s, that to another question "
        f"about it, where the picture comes first in the prompt, after {seen:.2f} s (for a picture in another place, "
        "[image_cost](results/image_cost/table.md))."
    )


def crowd_part(results: Path) -> str:
    """What a crowd of clients and what requests made from the API document found."""
    return paragraph(soak_sentence(results / "soak") + " " + fuzz_sentence(results / "api_fuzz"))


def soak_sentence(folder: Path) -> str:
    """What the soak found."""
    server = json.loads((folder / "server.json").read_text())
    with gzip.open(folder / "requests.jsonl.gz", "rt") as file:
        requests = [json.loads(line) for line in file]
    memory = Memory(**server["memory"])
    overhead = median(pooled(lines_of(folder / "tokens.jsonl"), "overhead"))
    return (
        f"In [{max(each['start'] for each in requests) / 60:.0f} minutes of well and badly behaved clients]"
        f"(results/soak/table.md), of {len(requests):,} requests "
        f"{sum(each['outcome'] == 'lost' for each in requests)} were lost, "
        f"{sum(each.get('mixed', False) for each in requests)} got what belonged to another, and "
        f"{server['counters']['failed']} failed in the server, whose memory changed by {memory.slope()[0]:+.2f} MB per "
        f"minute after the warm-up (less than {LEAK_MB:g} is the aim); to the time of a token the server adds "
        f"{overhead:.2f} ms (median)."
    )


def fuzz_sentence(folder: Path) -> str:
    """What `experiments.api_fuzz` found. It has a table only where no answer was outside the document."""
    sent = "requests made from the API document, valid ones and others"
    if not (folder / "table.md").is_file():
        return f"`.venv/bin/python -m experiments.api_fuzz` sends {sent}, and compares each answer with the document."
    return (
        f"Of [{sent}](results/api_fuzz/table.md), none was answered with a failure of the server or in a way that the "
        "document does not have."
    )


def sampling_part(results: Path) -> str:
    """What choosing a token takes, by the baseline of the benchmarks."""
    kept = json.loads((results / "benchmarks" / "baseline.json").read_text())["benchmarks"]
    chosen = [entry for entry in kept if entry["name"].startswith("test_sampling[")]
    one, eight = (
        {
            entry["params"]["choice"]: f"{1e3 * entry['stats']['median']:.1f}"
            for entry in chosen
            if entry["params"]["rows"] == rows
        }
        for rows in (1, 8)
    )
    return paragraph(
        f"To choose a token among the {QWEN_VOCABULARY:,} of Qwen3-VL takes {one['greedy']} ms if greedy, "
        f"{one['top_k_top_p']} ms with temperature, top-k and top-p, {one['temperature']} ms with temperature alone, "
        f"where every token takes part in the draw; for eight sequences together {eight['greedy']}, "
        f"{eight['top_k_top_p']} and {eight['temperature']} ms."
    )


PARTS: Mapping[str, Callable[[Path], str]] = {
    "parity": parity_part,
    "speed": speed_part,
    "batch": batch_part,
    "crowd": crowd_part,
    "sampling": sampling_part,
}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of a file that has one in each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def raw_samples(results: Path, name: str) -> list[Sample]:
    """The samples of an experiment of the reproduction."""
    return Raw(results / name / "raw.jsonl").samples


def listed(values: Sequence[float]) -> str:
    """`0.50 and 0.34`; whole numbers as they are."""
    texts = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]


def paragraph(text: str) -> str:
    """Lines of README's width."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def between(readme: str, begin: str, text: str) -> str:
    """README.md's text with `text` between a mark and the next end."""
    before, rest = readme.split(begin, 1)
    _, after = rest.split(END, 1)
    return f"{before}{begin}{text}{END}{after}"


def written(readme: str, results: Path = RESULTS) -> str:
    """README.md's text with all parts as the results have them."""
    for name, part in PARTS.items():
        readme = between(readme, BEGIN.format(name), part(results))
    return readme


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m experiments.readme_numbers", description=__doc__.split("\n")[0]
    ).parse_args()
    README.write_text(written(README.read_text()))
