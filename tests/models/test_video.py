"""Videos against transformers' video processor (see tests/references/make_processor_references.py)."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.errors import MediaError
from models.images import ImageProcessor
from models.video import MAX_FRAMES, frame_size, process_video

REFERENCES = Path(__file__).parents[1] / "references"
REFERENCE = json.loads((REFERENCES / "processor.json").read_text())
PUBLISHED = ImageProcessor.from_folder(None, max_image_tokens=16384)


def frames(count: int) -> list[Image.Image]:
    """The first frames of the reference's strip."""
    strip = Image.open(REFERENCES / "processor" / "frames.png").convert("RGB")
    height = strip.height // 5
    return [strip.crop((0, index * height, strip.width, (index + 1) * height)) for index in range(count)]


@pytest.mark.parametrize("expected", REFERENCE["videos"], ids=lambda case: f"{case['frames']} frames")
def test_equals_transformers_to_the_bit(expected):
    visual, times = process_video(frames(expected["frames"]), 2.0, PUBLISHED)
    assert visual.kind == "video"
    assert list(visual.grid) == expected["grid"]
    assert visual.grid[0] == math.ceil(expected["frames"] / 2)
    assert times == expected["timestamps"]
    samples = [*visual.patches[0, :3].tolist(), *visual.patches[-1, -3:].tolist()]
    assert samples == expected["samples"]
    assert hashlib.sha256(visual.patches.tobytes()).hexdigest() == expected["sha256"]


def test_frame_sizes_equal_transformers():
    for count, height, width, *expected in REFERENCE["video_sizes"]:
        assert list(frame_size(count, height, width, PUBLISHED)) == expected, (count, height, width)


def test_the_last_frame_fills_an_odd_group():
    three, _ = process_video(frames(3), 1.0, PUBLISHED)
    four, _ = process_video([*frames(3), frames(3)[-1]], 1.0, PUBLISHED)
    assert three.content_hash == four.content_hash


@pytest.mark.parametrize(
    ("count", "fps", "expected"),
    [(4, 2.0, [0.25, 1.25]), (5, 1, [0.5, 2.5, 4.0]), (1, 3.0, [0.0]), (2, 0.5, [1.0])],
)
def test_a_group_has_the_time_between_its_frames(count, fps, expected):
    assert process_video(frames(count), fps, PUBLISHED)[1] == expected


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("budget", [4, 50, 1280])
def test_a_frame_group_costs_no_more_than_a_picture(count, budget):
    processor = ImageProcessor.from_folder(None, max_image_tokens=budget)
    for size in ((3000, 2000), (33, 900), (640, 480)):
        rows, columns = frame_size(count, *size, processor)
        assert rows * columns // 32**2 <= budget


def test_many_frames_share_the_volume():
    rows, columns = frame_size(MAX_FRAMES, 1080, 1920, ImageProcessor.from_folder(None))
    assert MAX_FRAMES * rows * columns <= 25165824


def test_frames_may_be_of_any_mode():
    grey = [frame.convert("L") for frame in frames(2)]
    again = [frame.convert("RGB") for frame in grey]
    assert process_video(grey, 1.0, PUBLISHED)[0].content_hash == process_video(again, 1.0, PUBLISHED)[0].content_hash


def test_frames_differ_and_do_not_mix():
    """A patch holds its first frame and then its second, for each channel."""
    processor = ImageProcessor(2, 2, 2, 1, 10**6, (0.0,) * 3, (1 / 255,) * 3, min_volume=1)
    plain = [Image.new("RGB", (4, 4), (10 * index, 10 * index + 1, 10 * index + 2)) for index in range(4)]
    visual, _ = process_video(plain, 1.0, processor)
    assert visual.grid == (2, 2, 2)
    patches = np.rint(visual.patches).astype(int).reshape(2, 4, 3, 2, 4)
    expected = np.array(
        [[[10 * (2 * group + frame) + c for frame in range(2)] for c in range(3)] for group in range(2)]
    )
    np.testing.assert_array_equal(patches, np.broadcast_to(expected[:, None, :, :, None], patches.shape))


def test_frames_of_different_sizes_are_refused():
    with pytest.raises(MediaError, match="one size, found 4 x 5, 40 x 50"):
        process_video([Image.new("RGB", (40, 50)), Image.new("RGB", (4, 5))], 1.0, PUBLISHED)


@pytest.mark.parametrize("count", [0, MAX_FRAMES + 1])
def test_the_number_of_frames_is_limited(count):
    with pytest.raises(MediaError, match=f"1 to {MAX_FRAMES} frames, found {count}"):
        process_video([Image.new("RGB", (4, 4))] * count, 1.0, PUBLISHED)


@pytest.mark.parametrize("fps", [0, -1.0, math.nan, math.inf])
def test_the_frame_rate_must_be_positive(fps):
    with pytest.raises(MediaError, match="fps must be positive"):
        process_video(frames(2), fps, PUBLISHED)


def test_a_long_narrow_video_is_refused():
    with pytest.raises(MediaError, match="200 times"):
        process_video([Image.new("RGB", (8100, 40))], 1.0, PUBLISHED)
