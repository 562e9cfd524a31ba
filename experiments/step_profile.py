"""Where the time of a decode step goes: XLA's own trace of its operations, told apart by the source that made them."""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import jax

from experiments.bench_steps import DecodeSteps

CONTAINERS = ("while", "conditional", "call")  # operations whose time is that of others
HOST, BETWEEN = "host", "between operations"
KERNELS = {
    "kestrel_matmul": "matrix products",
    "kestrel_gated_mlp": "matrix products",
    "kestrel_experts": "matrix products",
    "kestrel_attention": "attention",
    "kestrel_choose_experts": "router",
    "kestrel_sample": "sampling",
}
FILES = {
    "ops.py": "embedding",
    "reference.py": "embedding",
    "rope.py": "norms, rope, elementwise",
    "attention.py": "norms, rope, elementwise",
    "layers.py": "norms, rope, elementwise",
    "network.py": "norms, rope, elementwise",
}
OTHER = "copies and other"
DEFINITION = re.compile(r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<result>.*?) (?P<opcode>[a-z][a-z0-9-]*)\(")
TABLE_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")


@dataclass(frozen=True)
class Operation:
    """An operation of the compiled step: its XLA opcode, the source that made it (`file.py function`; for a kernel its
    name and the shapes of its results), and the group it belongs to."""

    name: str
    opcode: str
    source: str
    group: str

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.source


@dataclass(frozen=True)
class Run:
    """One execution of an operation: start and end in nanoseconds, and the number of the step's execution."""

    operation: str
    start: float
    end: float
    step: int


def read_operations(text: str) -> dict[str, Operation]:
    """The operations in a compiled module's text, by name."""
    sources = _frame_sources(text)
    found = (_operation(line, sources) for line in text.splitlines())
    return {operation.name: operation for operation in found if operation is not None}


def _operation(line: str, sources: dict[int, str]) -> Operation | None:
    match = DEFINITION.match(line)
    if match is None:
        return None
    kernel = re.search(r'custom_call_target="(kestrel_\w+)"', line)
    if kernel:
        results = " ".join(re.findall(r"\[[\d,]+\]", match["result"]))
        return Operation(match["name"], match["opcode"], f"{kernel[1]} {results}", KERNELS[kernel[1]])
    frame = re.search(r"stack_frame_id=(\d+)", line)
    source = sources.get(int(frame[1]), "") if frame else ""
    group = FILES.get(source.split(" ")[0], OTHER)
    return Operation(match["name"], match["opcode"], source or match["opcode"], group)


def _frame_sources(text: str) -> dict[int, str]:
    """`file.py function` of every stack frame, from the tables at the head of a module's text."""
    tables: dict[str, dict[int, str]] = defaultdict(dict)
    title = ""
    for line in text.splitlines():
        row = TABLE_ROW.match(line)
        if row:
            tables[title][int(row[1])] = row[2] if row[2] is not None else row[3]
        elif line.isalpha():
            title = line

    def number(field: str, entry: str) -> int:
        return int(re.search(rf"{field}=(\d+)", entry)[1])

    sources = {}
    for frame, entry in tables["StackFrames"].items():
        location = tables["FileLocations"][number("file_location_id", entry)]
        file = PurePath(tables["FileNames"][number("file_name_id", location)]).name
        sources[frame] = f"{file} {tables['FunctionNames'][number('function_name_id', location)]}"
    return sources


def read_runs(trace: Path) -> Iterator[Run]:
    """Every execution of an operation in the newest trace below a folder."""
    file = max(trace.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    start = event.start_ns
                    yield Run(stats["hlo_op"], start, start + event.duration_ns, int(stats["run_id"]))


def share_out(runs: Iterable[Run]) -> tuple[Counter[str], float]:
    """Nanoseconds of wall time of each operation, and of the moments within a step at which none runs. Where several
    run at once, each gets an equal part."""
    by_step: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_step[run.step].append(run)
    shares: Counter[str] = Counter()
    idle = 0.0
    for step in by_step.values():
        edges = sorted([(run.start, 1, run.operation) for run in step] + [(run.end, 0, run.operation) for run in step])
        active: Counter[str] = Counter()
        before = edges[0][0]
        for moment, starts, operation in edges:
            running = active.total()
            if running:
                for name, count in active.items():
                    shares[name] += (moment - before) * count / running
            else:
                idle += moment - before
            active[operation] += 1 if starts else -1
            active += Counter()  # drops those that no longer run
            before = moment
    return shares, idle


class ProfiledSteps(DecodeSteps):
    """Decode steps that can be traced."""

    def profile(self, context: int, batch: int, steps: int) -> dict[str, Any]:
        """Milliseconds per step: with and without tracing, and while tracing of each `rows` entry (operations of one
        source, what lies between operations, and the host)."""
        plain = self.decode(context, batch, steps)["ms"]
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                traced = self.decode(context, batch, steps)["ms"]
            runs = list(read_runs(Path(folder)))
        text = self.inference.decode_text(batch, self.held[context, batch].layers)
        rows = breakdown(runs, read_operations(text), traced)
        return {"plain_ms": plain, "traced_ms": traced, "rows": rows}


def breakdown(runs: Sequence[Run], operations: dict[str, Operation], steps_ms: Sequence[float]) -> list[dict[str, Any]]:
    """Per step the milliseconds and the number of runs of each source of operations, in the last steps, of which
    `steps_ms` were measured; the rest of these is the host's."""
    runs = sorted((run for run in runs if run.operation in operations), key=lambda run: run.start)
    steps = len(steps_ms)
    last = list(dict.fromkeys(run.step for run in runs))[-steps:]  # those before were to warm up
    leaves = [run for run in runs if run.step in last and operations[run.operation].opcode not in CONTAINERS]
    shares, idle = share_out(leaves)
    nanoseconds: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for run in leaves:
        counts[operations[run.operation].key] += 1
    for name, share in shares.items():
        nanoseconds[operations[name].key] += share
    nanoseconds[BETWEEN, ""] = idle
    nanoseconds[HOST, ""] = sum(steps_ms) * 1e6 - nanoseconds.total()
    return [
        {"group": group, "source": source, "ms": total / steps / 1e6, "runs": counts[group, source] / steps}
        for (group, source), total in nanoseconds.most_common()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The breakdown in Markdown: by group, then by source."""
    whole = sum(row["ms"] for row in rows)
    groups = Counter()
    for row in rows:
        groups[row["group"]] += row["ms"]
    lines = ["| what | ms per step | share |", "|---|---|---|"]
    lines += [f"| {group} | {ms:.2f} | {ms / whole:.1%} |" for group, ms in groups.most_common()]
    lines += [f"| all | {whole:.2f} | |", "", "| what | from | runs per step | ms per step |", "|---|---|---|---|"]
    lines += [
        f"| {row['group']} | {row['source']} | {row['runs']:g} | {row['ms']:.3f} |" for row in rows if row["source"]
    ]
    return "\n".join(lines) + "\n"
