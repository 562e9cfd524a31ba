"""The measured numbers of README.md are those of the results."""

import json
import math
import re
import shutil

import pytest

from experiments import readme_numbers, scaling_model
from experiments.bench import OURS
from experiments.readme_numbers import RESULTS
from models.cache import bytes_per_token

README = readme_numbers.README.read_text()


def test_the_numbers_are_those_of_the_results():
    marks = re.findall(r"<!-- written by experiments\.readme_numbers: (\w+) -->", README)
    assert sorted(marks) == sorted(readme_numbers.PARTS)
    assert readme_numbers.written(README) == README, "python -m experiments.readme_numbers writes them anew"


def test_a_part_is_replaced_up_to_its_end():
    text = readme_numbers.between("a\nmark\nold\n<!-- end -->\nb\n<!-- end -->\n", "mark\n", "new\n")
    assert text == "a\nmark\nnew\n<!-- end -->\nb\n<!-- end -->\n"


def test_other_times_give_other_numbers_and_the_same_sentences(tmp_path):
    for name in ("speed", "scaling_model"):
        shutil.copytree(RESULTS / name, tmp_path / name)
    file = tmp_path / "speed" / "decode-2b" / "raw.jsonl"
    samples = readme_numbers.lines_of(file)
    slower = [
        sample | {"ms": [2 * ms for ms in sample["ms"]]} if sample["program"] == OURS else sample for sample in samples
    ]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in slower))
    before, after = (readme_numbers.speed_part(results).splitlines() for results in (RESULTS, tmp_path))
    changed = [(cells(old), cells(new)) for old, new in zip(before, after, strict=True) if old != new]
    assert [old[0] for old, _ in changed] == [step.what for step in readme_numbers.STEPS if step.part == "decode-2b"]
    for old, new in changed:
        for column, digits in ((1, 1), (2, 2), (4, 2)):  # each rounded
            assert float(new[column]) == pytest.approx(2 * float(old[column]), abs=1.6 * 10**-digits)
        assert new[3] == old[3]


def cells(row: str) -> list[str]:
    """Of a row of a table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_what_the_document_found_is_told_where_it_is_there(tmp_path):
    assert "experiments.api_fuzz" in readme_numbers.fuzz_sentence(tmp_path)
    (tmp_path / "table.md").write_text("a table")
    assert "(results/api_fuzz/table.md), none" in readme_numbers.fuzz_sentence(tmp_path)


def test_numbers_in_a_row():
    assert readme_numbers.listed([24]) == "24"
    assert readme_numbers.listed([0.5, 0.338]) == "0.50 and 0.34"
    assert readme_numbers.listed([1, 2, 3]) == "1, 2 and 3"


def test_the_cache_of_a_token_takes_what_is_said():
    kib = bytes_per_token(scaling_model.config_of(scaling_model.TWO).text, "int8") / 2**10
    assert f"takes {kib:.0f} KiB per token, {kib * 4:.0f} MiB for 4096" in README


@pytest.mark.parametrize(
    ("name", "count"), re.findall(r"^\| `([\w-]+)` \|[^|]*\| ([\d,]{7,}) \|", README, re.MULTILINE)
)
def test_models_have_the_parameters_that_are_said(name, count):
    shapes = scaling_model.parameters(name).values()
    assert f"{sum(math.prod(parameter.shape) for parameter in shapes):,}" == count
