"""Parity with transformers: float32 logits and greedy tokens of small random checkpoints, case by case.

Claim: every case's logits differ by at most 5e-5 of their range, and 48 greedy tokens are identical; every negative
control, which gets one detail wrong, differs by more. Cost: two minutes on 2 cores.

    python -m experiments.parity

Prints the table and writes results/parity/. The cases are made by tests/references/make_parity_cases.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import models
from experiments.environment import write_environment
from models import Switches

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "references" / "parity"
TOLERANCE = 5e-5  # of the logits' range
VISUAL = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
# What each control gets wrong, and the cases that must notice.
CONTROLS: dict[str, tuple[Switches, str]] = {
    "DeepStack off": (Switches(deepstack=False), "vl_"),
    "DeepStack one block off": (Switches(deepstack_offset=-1), "vl_"),
    "one-dimensional positions": (Switches(mrope="1d"), "vl_"),
    "MRoPE in sections": (Switches(mrope="sectioned"), "vl_"),
    "tanh GELU in the mergers": (Switches(exact_merger_gelu=False), "vl_"),
    "no frame mask": (Switches(frame_mask=False), "vl_video"),
    "rows and columns swapped": (Switches(swap_rows_and_columns=True), "vl_"),
    "another rope theta": (Switches(rope_theta=500000.0), ""),
    "no query and key norm": (Switches(qk_norm=False), ""),
}


@dataclass(frozen=True)
class Difference:
    """One case under one setting: the largest difference of a logit, as a share of the logits' range, and how many of
    the greedy tokens are those of transformers before the first that is not."""

    case: str
    control: str
    difference: float
    equal_tokens: int
    tokens: int

    @property
    def passes(self) -> bool:
        """Whether this is parity."""
        return self.difference <= TOLERANCE and self.equal_tokens == self.tokens


def cases() -> list[str]:
    """The names of all cases."""
    return sorted(folder.name for folder in CASES.iterdir() if folder.is_dir())


def measure(case: str, control: str = "", switches: Switches | None = None) -> Difference:
    """Compares one case with its reference."""
    reference = dict(np.load(CASES / case / "reference.npz"))
    visual = {name: reference[name] for name in VISUAL if name in reference}
    model = models.load(CASES / case, switches=switches)
    logits = model.logits(reference["token_ids"], **visual)
    wanted, greedy = reference["logits"], reference["greedy"].tolist()
    steps = model.generate(reference["token_ids"], max_tokens=len(greedy), ignore_eos=True, **visual)
    equal = [step.token_id == token for step, token in zip(steps, greedy, strict=True)]
    return Difference(
        case=case,
        control=control,
        difference=float(np.abs(logits - wanted).max() / (wanted.max() - wanted.min())),
        equal_tokens=next((index for index, same in enumerate(equal) if not same), len(equal)),
        tokens=len(greedy),
    )


def controls_of(case: str) -> Iterator[tuple[str, Switches]]:
    """The negative controls that a case must notice."""
    for name, (switches, prefix) in CONTROLS.items():
        if case.startswith(prefix):
            yield name, switches


def table(rows: list[Difference]) -> str:
    """The results in Markdown: parity first, then the controls."""
    lines = ["| case | max difference / range | greedy tokens equal |", "|---|---|---|"]
    lines += [
        f"| {row.case} | {row.difference:.1e} | {row.equal_tokens} / {row.tokens} |" for row in rows if not row.control
    ]
    lines += ["", "| negative control | case | max difference / range | greedy tokens equal |", "|---|---|---|---|"]
    lines += [
        f"| {row.control} | {row.case} | {row.difference:.1e} | {row.equal_tokens} / {row.tokens} |"
        for row in rows
        if row.control
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures everything, prints the table and writes the results."""
    rows = [measure(case) for case in cases()]
    rows += [measure(case, name, switches) for case in cases() for name, switches in controls_of(case)]
    rows.sort(key=lambda row: (row.control, row.case))
    folder = ROOT / "results" / "parity"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (folder / "table.md").write_text(table(rows))
    write_environment(folder)
    print(table(rows))


if __name__ == "__main__":
    main()
