"""Logits and greedy tokens equal transformers' on the committed cases, and every detail got wrong is noticed."""

import json
from itertools import zip_longest

import numpy as np
import pytest

import models
from experiments.parity import (
    CASES,
    CONTROLS,
    TOLERANCE,
    Reference,
    case_names,
    control_cases,
    logit_difference,
    measure,
    measure_control,
    read_reference,
)
from models import LoadedModel, Prompt, Switches
from models.config import parse_config
from models.images import VisionInput
from models.positions import rope_positions

VL_CASES = [case for case in case_names() if case.startswith("vl_")]


@pytest.mark.parametrize("case", case_names())
def test_logits_and_greedy_tokens_equal_transformers(case):
    result = measure(case)
    assert result.difference <= TOLERANCE
    assert result.margin_difference <= TOLERANCE
    assert result.equal_tokens == result.tokens == 48


@pytest.mark.usefixtures("unoptimised")
@pytest.mark.parametrize("control", CONTROLS)
def test_a_detail_got_wrong_is_noticed(control):
    case = control_cases(control)[0]  # experiments/parity.py tries them all
    assert measure_control(control, case).difference > 10 * TOLERANCE


def in_order(reference: Reference) -> list[VisionInput]:
    """The pictures of a case that has only images or only videos."""
    pictures = []
    for kind, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        start = 0
        for grid in reference.visual.get(grids, []):
            end = start + int(np.prod(grid))
            pictures.append(VisionInput(reference.visual[pixels][start:end], tuple(map(int, grid)), kind))
            start = end
    return pictures


@pytest.mark.parametrize("case", VL_CASES)
def test_positions_equal_transformers(case):
    reference = read_reference(case)
    config = parse_config(json.loads((CASES / case / "config.json").read_text()))
    pictures = in_order(reference)
    if case == "vl_image_and_video":  # video, image, video
        pictures = [pictures[1], pictures[0], pictures[2]]
    grids = [picture.grid for picture in pictures]
    positions, delta = rope_positions(reference.token_ids, grids, config, Switches())
    np.testing.assert_array_equal(positions, reference.position_ids)
    assert delta == reference.rope_delta


@pytest.fixture(scope="module")
def images_model() -> LoadedModel:
    return models.load(CASES / "vl_images")


def stream_tokens(model: LoadedModel, reference: Reference) -> list[int]:
    return [step.token_id for step in model.generate(prompt_of(reference), max_tokens=48)]


def prompt_of(reference: Reference) -> Prompt:
    return Prompt(reference.token_ids, tuple(in_order(reference)))


@pytest.mark.parametrize("case", ["vl_images", "vl_video"])
def test_streamed_tokens_equal_transformers(case):
    reference = read_reference(case)
    assert stream_tokens(models.load(CASES / case), reference) == reference.greedy


def text_only(reference: Reference) -> Reference:
    """A case's text without its pictures; only ids below the special tokens are text here."""
    ids = reference.token_ids[reference.token_ids < 195]
    return Reference(ids, {}, reference.logits, reference.greedy, reference.margins, None, None)


def one_picture(reference: Reference, index: int) -> Reference:
    """A prompt with one of a case's images between two runs of text."""
    pictures = in_order(reference)
    tokens = [np.prod(picture.grid) // 4 for picture in pictures]
    image_token = 197
    text = text_only(reference).token_ids
    ids = np.concatenate([text[:4], np.full(tokens[index], image_token), text[4:]]).astype(np.int32)
    visual = {"pixel_values": pictures[index].patches, "image_grid_thw": np.array([pictures[index].grid])}
    return Reference(ids, visual, reference.logits, reference.greedy, reference.margins, None, None)


def test_a_request_leaves_nothing_behind(images_model):
    """A picture, then text only, then a picture of another size: each as in a fresh model."""
    reference = read_reference("vl_images")
    requests = [reference, text_only(reference), one_picture(reference, 1), one_picture(reference, 2)]
    fresh = [stream_tokens(models.load(CASES / "vl_images"), request) for request in requests]
    assert fresh[0] == reference.greedy
    assert [stream_tokens(images_model, request) for request in requests] == fresh
    assert [stream_tokens(images_model, request) for request in reversed(requests)] == fresh[::-1]


def test_interleaved_requests_do_not_mix(images_model):
    reference = read_reference("vl_images")
    other = one_picture(reference, 1)
    alone = stream_tokens(images_model, other)
    tokens = ([], [])
    streams = [images_model.generate(prompt_of(asked), max_tokens=48) for asked in (reference, other)]
    for steps in zip_longest(*streams):
        for found, step in zip(tokens, steps, strict=True):
            if step is not None:
                found.append(step.token_id)
    assert tokens == (reference.greedy, alone)


def test_spellings_of_yarn_are_equivalent():
    """`rope_theta` with `rope_scaling` that says `type` or `rope_type`, and the `rope_parameters` of transformers 5."""
    config = json.loads((CASES / "dense_yarn" / "config.json").read_text())
    scaling = dict(config["rope_scaling"])
    kind = scaling.pop("type")
    newer = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    spellings = [
        config,
        config | {"rope_scaling": scaling | {"rope_type": kind}},
        newer | {"rope_parameters": scaling | {"rope_type": kind, "rope_theta": config["rope_theta"]}},
    ]
    parsed = [parse_config(spelling) for spelling in spellings]
    assert parsed[0].text.rope.yarn is not None
    assert parsed[0] == parsed[1] == parsed[2]


@pytest.mark.parametrize("case", ["dense_bfloat16_sharded", "vl_moe"])
def test_bfloat16_weights_kept_narrow_compute_the_same(case):
    """The stored numbers are bfloat16 already, and activations stay float32."""
    assert logit_difference(models.load(CASES / case, dtype="bfloat16"), read_reference(case)) <= TOLERANCE
