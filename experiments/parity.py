"""Parity with transformers: float32 logits and greedy tokens of small random checkpoints, case by case.

Claim: in every case the logits differ from those of transformers by at most 5e-5 of their range, and 48 greedy tokens
are identical; every negative control, which gets one detail wrong, differs by more. Cost: two minutes on 2 cores.

    python -m experiments.parity

Prints the table and writes results/parity/. The cases are made by tests/references/make_parity_cases.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import models
from experiments.environment import write_environment
from models import LoadedModel, Switches

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "references" / "parity"
TOLERANCE = 5e-5  # of the logits' range


@dataclass(frozen=True)
class Reference:
    """What transformers made of a case: `logits` float32 `[length, vocab]`; `greedy` and `margins` `[48]`; and, for a
    prompt with pictures, `position_ids` `[3, length]` and `rope_delta`. `visual` holds the picture arguments of
    `LoadedModel.logits`."""

    token_ids: np.ndarray
    visual: dict[str, np.ndarray]
    logits: np.ndarray
    greedy: list[int]
    margins: np.ndarray
    position_ids: np.ndarray | None
    rope_delta: int | None

    @property
    def range(self) -> float:
        """Largest minus smallest logit."""
        return float(np.ptp(self.logits))


@dataclass(frozen=True)
class Control:
    """One detail got wrong, by a switch or by a changed field of config.json; the cases whose names contain one of
    `applies` must notice."""

    switches: Switches | None = None
    config: tuple[tuple[str, Any], ...] = ()
    applies: tuple[str, ...] = ("vl_",)


CONTROLS = {
    "DeepStack off": Control(Switches(deepstack=False)),
    "DeepStack taps one block off": Control(Switches(deepstack_offset=-1)),
    "one-dimensional positions": Control(Switches(mrope="1d")),
    "MRoPE in sections": Control(Switches(mrope="sectioned")),
    "rows and columns swapped": Control(Switches(swap_rows_and_columns=True)),
    "tanh GELU in the mergers": Control(Switches(exact_merger_gelu=False)),
    "no frame mask": Control(Switches(frame_mask=False), applies=("video",)),
    "transformers' default theta": Control(Switches(rope_theta=500000.0), applies=("",)),
    "no query and key norm": Control(Switches(qk_norm=False), applies=("",)),
    "YaRN off": Control(config=(("rope_scaling", None),), applies=("dense_yarn",)),
    "not renormalised": Control(config=(("norm_topk_prob", False),), applies=("moe_renormalised", "moe_mixed")),
    "renormalised": Control(config=(("norm_topk_prob", True),), applies=("moe_not_renormalised",)),
}


@dataclass(frozen=True)
class Parity:
    """One case: the largest difference of a logit and of a greedy step's margin, as shares of the logits' range, and
    how many greedy tokens are those of transformers before the first that is not."""

    case: str
    difference: float
    margin_difference: float
    equal_tokens: int
    tokens: int


@dataclass(frozen=True)
class ControlResult:
    """The largest difference that a control makes in one case, as a share of the logits' range."""

    control: str
    case: str
    difference: float


def case_names() -> list[str]:
    """The names of all cases."""
    return sorted(folder.name for folder in CASES.iterdir() if folder.is_dir())


def read_reference(case: str) -> Reference:
    """Reads a case's reference.npz; its pixel levels of 0..255 stand for pixel values of -1..1."""
    stored = dict(np.load(CASES / case / "reference.npz"))
    visual = {}
    for prefix, pixels, grid in (
        ("", "pixel_values", "image_grid_thw"),
        ("video_", "pixel_values_videos", "video_grid_thw"),
    ):
        if f"{prefix}grids" in stored:
            visual[pixels] = stored[f"{prefix}pixels"].astype(np.float32) / np.float32(127.5) - 1
            visual[grid] = stored[f"{prefix}grids"]
    return Reference(
        token_ids=stored["token_ids"],
        visual=visual,
        logits=stored["logits"],
        greedy=stored["greedy"].tolist(),
        margins=stored["margins"],
        position_ids=stored.get("position_ids"),
        rope_delta=int(stored["rope_delta"]) if visual else None,
    )


def logit_difference(model: LoadedModel, reference: Reference) -> float:
    """The largest difference of a logit, as a share of the reference's range."""
    logits = model.logits(reference.token_ids, **reference.visual)
    return float(np.abs(logits - reference.logits).max()) / reference.range


def measure(case: str) -> Parity:
    """Compares one case with its reference."""
    reference = read_reference(case)
    model = models.load(CASES / case)
    steps = list(
        model.generate(reference.token_ids, max_tokens=len(reference.greedy), ignore_eos=True, **reference.visual)
    )
    equal = [step.token_id == token for step, token in zip(steps, reference.greedy, strict=True)]
    margins = np.array([step.margin for step in steps])
    return Parity(
        case=case,
        difference=logit_difference(model, reference),
        margin_difference=float(np.abs(margins - reference.margins).max()) / reference.range,
        equal_tokens=next((index for index, same in enumerate(equal) if not same), len(equal)),
        tokens=len(equal),
    )


def measure_control(name: str, case: str) -> ControlResult:
    """The difference that a control makes in one case."""
    control = CONTROLS[name]
    with changed_config(CASES / case, dict(control.config)) as folder:
        model = models.load(folder, switches=control.switches)
        return ControlResult(name, case, logit_difference(model, read_reference(case)))


def control_cases(name: str) -> list[str]:
    """The cases that must notice a control."""
    return [case for case in case_names() if any(part in case for part in CONTROLS[name].applies)]


@contextmanager
def changed_config(checkpoint: Path, changes: dict[str, Any]) -> Iterator[Path]:
    """A folder with the checkpoint's weights, and with `changes` made to its config.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in checkpoint.iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((checkpoint / "config.json").read_text()) | changes
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def table(cases: list[Parity], controls: list[ControlResult]) -> str:
    """The results in Markdown."""
    lines = [
        "| case | max logit difference / range | max margin difference / range | greedy tokens equal |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {row.difference:.1e} | {row.margin_difference:.1e} | {row.equal_tokens} / {row.tokens} |"
        for row in cases
    ]
    lines += ["", "| negative control | smallest difference / range | largest | cases |", "|---|---|---|---|"]
    for name in CONTROLS:
        found = sorted((row.difference, row.case) for row in controls if row.control == name)
        smallest, largest = (f"{difference:.1e} ({case})" for difference, case in (found[0], found[-1]))
        lines.append(f"| {name} | {smallest} | {largest} | {len(found)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures everything, prints the table and writes the results."""
    cases = [measure(case) for case in tqdm(case_names(), desc="cases", leave=False)]
    pairs = [(name, case) for name in CONTROLS for case in control_cases(name)]
    controls = [measure_control(*pair) for pair in tqdm(pairs, desc="controls", leave=False)]
    folder = ROOT / "results" / "parity"
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "tolerance": TOLERANCE,
        "cases": [asdict(row) for row in cases],
        "controls": [asdict(row) for row in controls],
    }
    (folder / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    (folder / "table.md").write_text(table(cases, controls))
    write_environment(folder)
    print(table(cases, controls))


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m experiments.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
