"""The parity table and its cases; the measurements themselves are tested in tests/models/test_parity.py."""

import json

from experiments.parity import CASES, CONTROLS, ControlResult, Parity, case_names, changed_config, control_cases, table


def test_every_control_has_cases_and_every_case_a_control():
    covered = [control_cases(name) for name in CONTROLS]
    assert all(covered)
    assert set(case_names()) == {case for cases in covered for case in cases}
    assert control_cases("no frame mask") == ["vl_image_and_video", "vl_video"]


def test_changed_config_keeps_the_weights_and_the_original():
    original = (CASES / "moe_mixed" / "config.json").read_text()
    with changed_config(CASES / "moe_mixed", {"norm_topk_prob": False}) as folder:
        assert json.loads((folder / "config.json").read_text()) == json.loads(original) | {"norm_topk_prob": False}
        assert (folder / "model.safetensors").samefile(CASES / "moe_mixed" / "model.safetensors")
    assert not folder.exists()
    assert (CASES / "moe_mixed" / "config.json").read_text() == original


def test_table_shows_the_weakest_and_the_strongest_case_of_a_control():
    controls = [ControlResult(name, case, value) for name in CONTROLS for case, value in (("a", 0.5), ("b", 0.25))]
    text = table([Parity("dense_tied", 1.5e-6, 5e-7, 48, 48)], controls)
    assert "| dense_tied | 1.5e-06 | 5.0e-07 | 48 / 48 |" in text
    assert "| DeepStack off | 2.5e-01 (b) | 5.0e-01 (a) | 2 |" in text
