"""Every documented figure beside what it is here: runs the experiments, and writes the report and its page.

    python -m experiments.report --quick     (make reproduce: under 15 minutes on 2 cores, into results/quick/)
    python -m experiments.report             (make reproduce-full: into results/)

`--model DIR` measures a real checkpoint, `--url` a server that runs already, and `--server-machine RK3588` says what it
runs on. `--render` writes the report, its page and the table in README.md from the results that are there.
"""

from __future__ import annotations

import argparse
import gc
import html
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

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
    prefix_reuse,
    quantisation,
    readme_numbers,
    residency,
    scaling_model,
    shared_state,
    speculation,
    sse_timeline,
    threads,
)
from experiments.bench import ROOT, command_line
from experiments.bench_steps import config_of
from experiments.environment import model_fingerprint
from experiments.experiment import Category, Experiment, Verdict
from experiments.not_measured import NOT_MEASURED
from experiments.served import folder_of
from experiments.tiny_models import TINY_MODELS

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
        quantisation,
        kv_precision,
        speculation,
        context_growth,
        image_cost,
        prefix_reuse,
        threads,
        residency,
    )
}
# Whose figures are those of the articles; the others' are of the documents.
ARTICLES = ("sse_timeline", "health_rtt", "concurrency", "batch_margin", "prefill_width")
CLIENTS = ("sse_timeline", "health_rtt", "concurrency")  # need nothing but a server
PICTURES = ("image_cost",)  # need a model that takes pictures
SMALL = ("flush_ablation", "backlog")  # about what no model changes; a large one would take hours and much memory
QUICK: Mapping[str, Sequence[str]] = {
    "sse_timeline": ("--quant", "q4", "--repeats", "3"),
    "health_rtt": ("--probes", "100", "--repeats", "2"),
    "concurrency": ("--answers", "24", "--repeats", "1"),
    "batch_margin": ("--model", "tiny-vl", "--groups", "2", "--prompts", "1"),
    "prefill_width": ("--model", "tiny-vl", "--prompts", "2"),
    "scaling_model": ("--repeats", "3"),
    "flush_ablation": ("--pace", "20", "--repeats", "2"),
    "backlog": ("--clients", "48", "--tokens", "30", "--repeats", "1"),
    "shared_state": ("--pairs", "5"),
    "ablation": ("--model", "tiny-vl", "--conversations", "1"),
    "quantisation": (
        *("--model", "tiny-vl", "--prompts", "1", "--conversations", "1", "--cases", "dense_tied"),
        *("--timed", "q4", "--prompt", "64", "--steps", "8", "--repeats", "1"),
    ),
    "kv_precision": ("--model", "tiny-vl", "--passages", "1", "--context", "256", "1024", "--repeats", "1"),
    "speculation": ("--questions", "4", "--tokens", "24", "--repeats", "1"),
    "context_growth": ("--context", "1024", "8192", "--prompt", "256", "1024", "--repeats", "1"),
    "image_cost": ("--size", "64", "512", "--repeats", "1"),
    "prefix_reuse": ("--kind", "again", "nothing", "--answer", "8", "--repeats", "1"),
    "threads": ("--length", "128", "--steps", "8", "--repeats", "1"),
    "residency": ("--answer", "8", "--disk-answer", "0", "--repeats", "1"),
}
README = ROOT / "README.md"
BEGIN = "<!-- written by experiments.report -->\n"
INTRODUCTION = (
    "Figures of the articles on Kestrel-LLM and of its documents, each with what it is here. *Holds* and *does not "
    "hold* say whether a statement that can be carried over to another machine is borne out; a time of the documented "
    "board cannot be judged on another machine, and its ratio says only how far apart the two are. A question that an "
    "article asks its reader is *answered*, as expected if nothing else is said. A guarantee that this project gives "
    "where the documents give none is *kept* or *broken*, and what says more about a documented figure is *measured*. "
    "Behind each figure stand the rule of the verdict, the "
    "command that measures it, and the raw data; n is the number of values that the median is of. Figures that were "
    "not measured are listed too."
)
KINDS: Mapping[Category, str] = {
    "documented": "documented figures",
    "question": "questions that the articles ask their readers",
    "guarantee": "guarantees of this project where the documents give none",
    "beside": "beside them",
}
PLURAL = {"holds": "hold", "does not hold": "do not hold"}
LEFT_OUT = "Documented figures that no experiment is about"

Figure = dict[str, Any]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, in results/quick")
    parser.add_argument("--model", help="a checkpoint folder, instead of random weights and of the small models")
    parser.add_argument("--url", help="a server that runs already, for the experiments that are clients")
    parser.add_argument("--model-name", help="the model's name in requests to that server")
    parser.add_argument("--server-machine", help="what that server runs on, such as RK3588")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, help="measure these; the others as they are")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument(
        "--out", type=Path, help="default: results; quick, the model's name or server in it, with these options"
    )
    options = parser.parse_args(arguments)
    of = folder_of(options.url) if options.url else Path(options.model or "").name
    options.out = options.out or ROOT / "results" / of / ("quick" if options.quick else "")
    return options


def measure(options: argparse.Namespace) -> None:
    """Runs what is to be measured, each experiment into its own folder. What was done when a run was stopped is noted
    in `unfinished.json`, and not measured again by the next."""
    options.out.mkdir(parents=True, exist_ok=True)
    note = options.out / "unfinished.json"
    done = json.loads(note.read_text()) if note.is_file() else []
    names = options.only or [name for name in EXPERIMENTS if fits(name, options)]
    for number, name in enumerate(names, 1):
        if name in done:
            continue
        print(f"{number} of {len(names)}: {name}", flush=True)
        arguments = list(QUICK[name]) if options.quick else []
        arguments += ["--model", options.model] if options.model and name not in SMALL else []
        arguments += server_arguments(options) if name in CLIENTS else []
        arguments += ["--out", os.path.relpath(options.out / name)] if options.out != ROOT / "results" else []
        EXPERIMENTS[name].run(arguments)
        gc.collect()  # networks and their compiled steps refer to each other, and the next one needs the memory
        done.append(name)
        note.write_text(json.dumps(done))
    note.unlink(missing_ok=True)


def server_arguments(options: argparse.Namespace) -> list[str]:
    """What an experiment that is a client is told of the server that runs already."""
    told = {"--url": options.url, "--model-name": options.model_name, "--server-machine": options.server_machine}
    return [part for name, value in told.items() if value for part in (name, value)]


def fits(name: str, options: argparse.Namespace) -> bool:
    """Whether an experiment can be about the server or the model that is asked for."""
    if options.url:
        return name in CLIENTS
    return not (options.model and name in PICTURES) or config_of(options.model).vision is not None


def found_in(folder: Path) -> dict[str, dict[str, Any]]:
    """What every experiment found, by its name: `figures`, `command`, `environment`. One without results has no
    `environment`, and its figures are not measured."""
    found = {}
    for name, experiment in EXPERIMENTS.items():
        file = folder / name / "figures.json"
        if file.is_file():
            told = json.loads(file.read_text())
            found[name] = told | {"environment": json.loads((folder / name / "environment.json").read_text())}
        else:
            figures = [figure.unmeasured() for figure in experiment.figures]
            found[name] = {"command": command_line(name, []), "figures": figures}
    return found


def measured(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of what was found, that of the experiments that have results."""
    return {name: told for name, told in found.items() if "environment" in told}


def number(value: float) -> str:
    """Three digits, without an exponent where that can be."""
    return "0" if value == 0 else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def here(figure: Figure) -> str:
    """What was measured: the median, from where to where, and of how many."""
    if "measured" not in figure:
        return ""
    middle, low, high = (number(figure[name]) for name in ("measured", "lowest", "highest"))
    unit = f" {figure['unit']}" if figure["unit"] else ""
    spread = f"{low}..{high}; " if low != high else ""
    return f"{middle}{unit} ({spread}n {figure['n']:,})"


def ratio(figure: Figure) -> str:
    """Measured over documented."""
    return number(figure["ratio"]) if figure.get("ratio") is not None else ""


def counts(found: Mapping[str, dict[str, Any]]) -> str:
    """How many figures of each kind there are by verdict; and those of experiments that were not run."""
    figures = [figure for told in measured(found).values() for figure in told["figures"]]
    parts = []
    for category, kind in KINDS.items():
        verdicts = Counter(each["verdict"] for each in figures if each.get("category", "documented") == category)
        told = [f"{count} {spelt(verdict, count)}" for verdict in get_args(Verdict) if (count := verdicts[verdict])]
        parts += [f"{kind}: {', '.join(told)}"] if told else []
    left = sum(len(told["figures"]) for told in found.values() if "environment" not in told)
    return "; ".join([*parts, *([f"{left} of experiments that were not run"] if left else [])])


def spelt(verdict: str, count: int) -> str:
    """A verdict after the number of figures that have it."""
    return verdict if count == 1 else PLURAL.get(verdict, verdict)


@cache
def fingerprint_here(model: str) -> str:
    """Of a small model as it is in models/pretrained."""
    return model_fingerprint(model)


def trainings(environment: Mapping[str, Any]) -> str:
    """Of which small models another training was measured than the one here, in sentences; "" where there is nothing to
    tell."""
    recorded, settings = environment.get("models", {}), environment.get("settings_of_run", {})
    asked = settings.get("model") or []
    names = [] if settings.get("url") else [asked] if isinstance(asked, str) else asked
    others = [name for name in recorded if name in TINY_MODELS and recorded[name] != fingerprint_here(name)]
    unknown = [name for name in names if name in TINY_MODELS and name not in recorded]
    told = [f"Measured with another training of {' and of '.join(others)} than the one here."] if others else []
    told += [f"Which training of {' and of '.join(unknown)} was measured is not recorded."] if unknown else []
    return " ".join(told)


def machine(environment: Mapping[str, Any]) -> str:
    """The machine in a line."""
    names = [environment["board"] or environment["cpu"], environment["architecture"], f"{environment['cores']} cores"]
    names += [f"{environment['memory_bytes'] / 2**30:.0f} GiB", f"kernels {environment['kernels']}"]
    names += [f"governor {environment['governor']}"] if environment["governor"] else []
    server = environment.get("server_machine")
    names += [f"client of a server on {server}"] if server else []
    commit, *changes = environment["commit"].split(maxsplit=1)
    return ", ".join([*names, " ".join([f"commit {commit[:12]}", *changes])])


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
        if "environment" not in told:
            lines += ["", "Not run. Command:", "", f"    {told['command']}", ""]
            continue
        lines += ["", trainings(told["environment"])] if trainings(told["environment"]) else []
        lines += ["", f"![{name}]({name}/plot.svg)", "", f"Machine: {machine(told['environment'])}. Command:", ""]
        lines += [f"    {told['command']}", ""]
        links = (f"[{title}]({name}/{file})" for file, title in FILES)
        lines += [f"{', '.join(links)}.", ""]
    lines += [f"## {LEFT_OUT}", "", "| figure | documented | source | why not |", "|---|---|---|---|"]
    lines += [f"| {each.what} | {each.printed} | {each.source} | {each.why} |" for each in NOT_MEASURED]
    lines.append("")
    return "\n".join(lines)


FILES = (("table.md", "table"), ("raw.jsonl", "raw data"), ("environment.json", "environment"))
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { border: 1px solid #ccc; padding: .35rem .6rem; text-align: left; vertical-align: top; }
td p { margin: .3rem 0 0; font-size: .85rem; color: #555; }
.holds, .kept, .answered, .measured { background: #e3f2e6; }
.does-not-hold, .broken, .answered-otherwise-than-expected { background: #fde7dd; }
.cannot-be-judged, .not-measured { background: #f2f2f2; }
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
        if "environment" not in told:
            parts.append(f"</table><p>Not run.</p><pre>{html.escape(told['command'])}</pre>")
            continue
        parts.append("</table>")
        parts += [f"<p>{html.escape(note)}</p>"] if (note := trainings(told["environment"])) else []
        parts.append(f'<img src="{name}/plot.svg" alt="Plot of {name}">')
        parts.append(f"<p>{html.escape(machine(told['environment']))}</p><pre>{html.escape(told['command'])}</pre>")
        parts.append(f"<p>{', '.join(f'<a href={name}/{file}>{title}</a>' for file, title in FILES)}</p>")
    parts.append(f"<h2>{LEFT_OUT}</h2><table><tr><th>figure<th>documented<th>source<th>why not</tr>")
    for each in NOT_MEASURED:
        cells = (html.escape(text) for text in (each.what, each.printed, each.source, each.why))
        parts.append(f"<tr>{''.join(f'<td>{cell}' for cell in cells)}</tr>")
    return "\n".join([*parts, "</table></html>", ""])


def page_row(figure: Figure) -> str:
    """A figure as a row of the page."""
    kind = figure["verdict"].split(" on ")[0].replace(" ", "-")
    note = f"{figure['why']}. Source: {figure['source']}; {figure['configuration']}."
    cells = [figure["printed"], here(figure), ratio(figure)]
    shown = "".join(f"<td>{html.escape(cell)}" for cell in cells)
    what = f"<td>{html.escape(figure['what'])}<p>{html.escape(note)}</p>"
    return f'<tr class="{kind}">{what}{shown}<td>{figure["verdict"]}</tr>'


def readme_table(found: Mapping[str, dict[str, Any]]) -> str:
    """What has results in short, for README.md: the figures of the articles, and how many of each other experiment's
    hold."""
    told = measured(found)
    lines = ["| figure | documented | here | ratio | verdict |", "|---|---|---|---|---|"]
    for name in (name for name in told if name in ARTICLES):
        for figure in told[name]["figures"]:
            what = f"[{figure['what']}](results/{name}/table.md)"
            lines.append(f"| {what} | {figure['printed']} | {here(figure)} | {ratio(figure)} | {figure['verdict']} |")
    others = {name: Counter(figure["verdict"] for figure in told[name]["figures"]) for name in told}
    others = {name: verdicts for name, verdicts in others.items() if name not in ARTICLES}
    shown = [verdict for verdict in get_args(Verdict) if any(verdicts[verdict] for verdicts in others.values())]
    lines += ["", f"| experiment | what it is about | {' | '.join(shown)} |", "|" + "---|" * (2 + len(shown))]
    for name, verdicts in others.items():
        about = EXPERIMENTS[name].about.split("\n")[0]
        numbers = " | ".join(str(verdicts[verdict]) for verdict in shown)
        lines.append(f"| [{name}](results/{name}/table.md) | {about} | {numbers} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, table: str) -> str:
    """README.md's text with the table between its two marks."""
    return readme_numbers.between(readme, BEGIN, table)


def main(arguments: Sequence[str]) -> None:
    """Measures and writes, as the command line says. A run that is stopped has its report too, of what is there."""
    options = options_of(arguments)
    try:
        if not options.render:
            measure(options)
    finally:
        write(options)


def write(options: argparse.Namespace) -> None:
    """The report, its page, and README's table where the results are this repository's own."""
    found = found_in(options.out)
    (options.out / "REPORT.md").write_text(markdown(found))
    (options.out / "report.html").write_text(page(found))
    if options.out == ROOT / "results":
        README.write_text(with_table(README.read_text(), readme_table(found)))
    print(f"{counts(found)}; see {options.out / 'REPORT.md'} and {options.out / 'report.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
