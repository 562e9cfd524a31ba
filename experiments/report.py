"""Every documented figure beside what it is here: runs the experiments, and writes the report and its page.

    python -m experiments.report --quick     (make reproduce: under 15 minutes on 2 cores, into results/quick/)
    python -m experiments.report             (make reproduce-full: into results/)

`--model DIR` measures a real checkpoint, `--url` a server that runs already. `--render` writes the report, its page and
the table in README.md from the results that are there.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import (
    ablation,
    backlog,
    batch_margin,
    concurrency,
    context_growth,
    flush_ablation,
    health_rtt,
    image_cost,
    kv_precision,
    prefill_width,
    scaling_model,
    shared_state,
    speculation,
    sse_timeline,
)
from experiments.bench import ROOT
from experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        sse_timeline,
        health_rtt,
        concurrency,
        batch_margin,
        prefill_width,
        scaling_model,
        flush_ablation,
        backlog,
        shared_state,
        ablation,
        kv_precision,
        speculation,
        context_growth,
        image_cost,
    )
}
CLIENTS = ("sse_timeline", "health_rtt", "concurrency")  # need nothing but a server
SMALL = ("flush_ablation", "backlog")  # about what no model changes; a large one would take hours and much memory
QUICK: Mapping[str, Sequence[str]] = {
    "sse_timeline": ("--quant", "q4", "--repeats", "3"),
    "health_rtt": ("--probes", "100", "--repeats", "2"),
    "concurrency": ("--answers", "24", "--repeats", "2"),
    "batch_margin": ("--groups", "5", "--prompts", "2"),
    "prefill_width": ("--prompts", "2"),
    "scaling_model": ("--repeats", "3"),
    "flush_ablation": ("--pace", "20", "--repeats", "2"),
    "backlog": ("--clients", "48", "--tokens", "120", "--repeats", "1"),
    "shared_state": ("--pairs", "5"),
    "ablation": ("--model", "tiny-vl", "--conversations", "4"),
    "kv_precision": ("--model", "tiny-vl", "--passages", "2", "--context", "256", "2048", "--repeats", "1"),
    "speculation": ("--questions", "8", "--guesses", "4", "--tokens", "32", "--repeats", "1"),
    "context_growth": ("--context", "1024", "8192", "--prompt", "256", "1024", "--repeats", "1"),
    "image_cost": ("--size", "64", "512", "--repeats", "1"),
}
README = ROOT / "README.md"
BEGIN, END = "<!-- written by experiments.report -->\n", "<!-- end -->\n"
INTRODUCTION = (
    "Figures of the articles on Kestrel-LLM and of its documents, each with what it is here. *Holds* and *does not "
    "hold* say whether a statement that can be carried over to another machine is borne out; a time of the documented "
    "board cannot be judged on another machine, and its ratio says only how far apart the two are. Behind each figure "
    "stand the rule of the verdict, the command that measures it, and the raw data."
)

Figure = dict[str, Any]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, in results/quick")
    parser.add_argument("--model", help="a checkpoint folder, instead of random weights and of the small models")
    parser.add_argument("--url", help="a server that runs already, for the experiments that are clients")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, help="measure these; the others as they are")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, help="default: results, or results/quick with --quick")
    options = parser.parse_args(arguments)
    options.out = options.out or ROOT / "results" / ("quick" if options.quick else "")
    return options


def measure(options: argparse.Namespace) -> None:
    """Runs what is to be measured, each experiment into its own folder. What was done when a run was stopped is noted
    in `unfinished.json`, and not measured again by the next."""
    options.out.mkdir(parents=True, exist_ok=True)
    note = options.out / "unfinished.json"
    done = json.loads(note.read_text()) if note.is_file() else []
    names = options.only or [name for name in EXPERIMENTS if not options.url or name in CLIENTS]
    for number, name in enumerate(names, 1):
        if name in done:
            continue
        print(f"{number} of {len(names)}: {name}", flush=True)
        arguments = list(QUICK[name]) if options.quick else []
        arguments += ["--model", options.model] if options.model and name not in SMALL else []
        arguments += ["--url", options.url] if options.url and name in CLIENTS else []
        arguments += ["--out", os.path.relpath(options.out / name)] if options.out != ROOT / "results" else []
        EXPERIMENTS[name].run(arguments)
        done.append(name)
        note.write_text(json.dumps(done))
    note.unlink(missing_ok=True)


def found_in(folder: Path) -> dict[str, dict[str, Any]]:
    """What every experiment that has results found, by its name: `figures`, `command`, `environment`."""
    found = {}
    for name in EXPERIMENTS:
        file = folder / name / "figures.json"
        if file.is_file():
            told = json.loads(file.read_text())
            found[name] = told | {"environment": json.loads((folder / name / "environment.json").read_text())}
    return found


def number(value: float) -> str:
    """Three digits, without an exponent where that can be."""
    return "0" if value == 0 else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def here(figure: Figure) -> str:
    """What was measured: the median, and from where to where."""
    if "measured" not in figure:
        return ""
    middle, low, high = (number(figure[name]) for name in ("measured", "lowest", "highest"))
    unit = f" {figure['unit']}" if figure["unit"] else ""
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}..{high})"


def ratio(figure: Figure) -> str:
    """Measured over documented."""
    return number(figure["ratio"]) if figure.get("ratio") is not None else ""


def counts(found: Mapping[str, dict[str, Any]]) -> str:
    """How many figures hold, do not, and cannot be judged."""
    verdicts = Counter(figure["verdict"] for told in found.values() for figure in told["figures"])
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))


def machine(environment: Mapping[str, Any]) -> str:
    """The machine in a line."""
    names = [environment["board"] or environment["cpu"], environment["architecture"], f"{environment['cores']} cores"]
    names += [f"{environment['memory_bytes'] / 2**30:.0f} GiB", f"kernels {environment['kernels']}"]
    names += [f"governor {environment['governor']}"] if environment["governor"] else []
    return ", ".join([*names, f"commit {environment['commit'][:12]}"])


def markdown(found: Mapping[str, dict[str, Any]]) -> str:
    """The report."""
    lines = ["# Documented figures, measured", "", INTRODUCTION, "", f"In all: {counts(found)}.", ""]
    for name, told in found.items():
        lines += [f"## {name}", "", EXPERIMENTS[name].about.split("\n")[0], ""]
        lines += ["| figure | documented | here | ratio | verdict |", "|---|---|---|---|---|"]
        for figure in told["figures"]:
            cells = [figure["what"], figure["printed"], here(figure), ratio(figure), f"**{figure['verdict']}**"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for figure in told["figures"]:
            lines.append(f"- {figure['what']}: {figure['why']}. Source: {figure['source']}; {figure['configuration']}.")
        lines += ["", f"![{name}]({name}/plot.svg)", "", f"Machine: {machine(told['environment'])}. Command:", ""]
        lines += [f"    {told['command']}", ""]
        lines += [
            f"[Table]({name}/table.md), [raw data]({name}/raw.jsonl), [environment]({name}/environment.json).",
            "",
        ]
    return "\n".join(lines)


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { border: 1px solid #ccc; padding: .35rem .6rem; text-align: left; vertical-align: top; }
td p { margin: .3rem 0 0; font-size: .85rem; color: #555; }
.holds { background: #e3f2e6; } .does-not-hold { background: #fde7dd; } .cannot-be-judged { background: #f2f2f2; }
img { max-width: 100%; } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; }
"""


def page(found: Mapping[str, dict[str, Any]]) -> str:
    """The report as one HTML page beside the folders of the experiments."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>Documented figures, measured</title><style>{STYLE}</style>",
        f"<h1>Documented figures, measured</h1><p>{html.escape(INTRODUCTION.replace('*', ''))}</p>",
        f"<p>In all: {html.escape(counts(found))}.</p>",
    ]
    for name, told in found.items():
        parts.append(f"<h2>{name}</h2><p>{html.escape(EXPERIMENTS[name].about.split(chr(10))[0])}</p>")
        parts.append("<table><tr><th>figure<th>documented<th>here<th>ratio<th>verdict</tr>")
        parts += [page_row(figure) for figure in told["figures"]]
        parts.append(f'</table><img src="{name}/plot.svg" alt="Plot of {name}">')
        parts.append(f"<p>{html.escape(machine(told['environment']))}</p><pre>{html.escape(told['command'])}</pre>")
        files = (("table.md", "table"), ("raw.jsonl", "raw data"), ("environment.json", "environment"))
        parts.append(f"<p>{', '.join(f'<a href={name}/{file}>{title}</a>' for file, title in files)}</p>")
    return "\n".join([*parts, "</html>", ""])


def page_row(figure: Figure) -> str:
    """A figure as a row of the page."""
    kind = figure["verdict"].split(" on ")[0].replace(" ", "-")
    note = f"{figure['why']}. Source: {figure['source']}; {figure['configuration']}."
    cells = [figure["printed"], here(figure), ratio(figure)]
    shown = "".join(f"<td>{html.escape(cell)}" for cell in cells)
    what = f"<td>{html.escape(figure['what'])}<p>{html.escape(note)}</p>"
    return f'<tr class="{kind}">{what}{shown}<td>{figure["verdict"]}</tr>'


def readme_table(found: Mapping[str, dict[str, Any]]) -> str:
    """All figures in short, for README.md."""
    lines = ["| figure | documented | here | ratio | verdict |", "|---|---|---|---|---|"]
    for name, told in found.items():
        for figure in told["figures"]:
            what = f"[{figure['what']}](results/{name}/table.md)"
            lines.append(f"| {what} | {figure['printed']} | {here(figure)} | {ratio(figure)} | {figure['verdict']} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, table: str) -> str:
    """README.md's text with the table between its two marks."""
    before, rest = readme.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}{table}{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Measures and writes, as the command line says."""
    options = options_of(arguments)
    if not options.render:
        measure(options)
    found = found_in(options.out)
    (options.out / "REPORT.md").write_text(markdown(found))
    (options.out / "report.html").write_text(page(found))
    if options.out == ROOT / "results":
        README.write_text(with_table(README.read_text(), readme_table(found)))
    print(f"{counts(found)}; see {options.out / 'REPORT.md'} and {options.out / 'report.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
