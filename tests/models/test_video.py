"""Videos against transformers' video processor (see tests/references/make_processor_references.py)."""

import contextlib
import hashlib
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from models.errors import MediaError
from models.images import ImageProcessor
from models.video import MAX_FRAMES, frame_size, process_video, read_animation

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


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 32])
@pytest.mark.parametrize("budget", [4, 50, 1280])
def test_a_video_costs_no_more_than_a_picture(count, budget):
    """Unless it has more groups than the budget has tokens: each has one."""
    processor = ImageProcessor.from_folder(None, max_image_tokens=budget)
    groups = -(-count // 2)
    for size in ((3000, 2000), (33, 900), (640, 480)):
        rows, columns = frame_size(count, *size, processor)
        assert groups * rows * columns // 32**2 <= max(budget, groups)


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


def animation(kind: str, count: int, duration: list[float] | float, **options) -> bytes:
    """A file of frames in greys that grow lighter."""
    pictures = [Image.new("L", (40, 30), 7 * index).convert("RGB") for index in range(count)]
    file = io.BytesIO()
    lossless = {"lossless": True} if kind == "WEBP" else {}
    pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], duration=duration, **lossless, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_read(kind):
    pictures, fps = read_animation(animation(kind, 5, [100, 200, 300, 400, 250]))
    assert [picture.mode for picture in pictures] == ["RGB"] * 5
    assert [picture.getpixel((20, 15))[1] for picture in pictures] == [0, 7, 14, 21, 28]
    assert fps == pytest.approx(5 / 1.25)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_a_still_picture_is_one_frame(kind):
    pictures, _ = read_animation(animation(kind, 1, 100))
    assert [picture.size for picture in pictures] == [(40, 30)]


def test_a_delay_that_is_none_counts_as_in_browsers():
    assert read_animation(animation("GIF", 4, 0))[1] == 10
    assert read_animation(animation("GIF", 4, 20))[1] == 50


def test_the_picture_for_programs_without_animations_is_no_frame():
    pictures, fps = read_animation(animation("PNG", 4, 500, default_image=True))
    assert [picture.getpixel((0, 0))[0] for picture in pictures] == [7, 14, 21]
    assert fps == 2


def test_texts_in_a_file_are_not_taken_for_its_times():
    texts = PngInfo()
    for key in ("duration", "default_image"):
        texts.add_text(key, "1")
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG", pnginfo=texts)
    pictures, fps = read_animation(file.getvalue())
    assert (len(pictures), fps) == (1, 10)


def test_what_is_transparent_in_a_frame_is_white():
    pictures = [Image.new("RGBA", (40, 30), (200, 0, 0, 255)) for _ in range(3)]
    for index, picture in enumerate(pictures):
        picture.paste((0, 0, 0, 0), (10 * index, 0, 10 * index + 10, 30))
    for kind in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        options = {"disposal": 2} if kind == "GIF" else {"lossless": True} if kind == "WEBP" else {"disposal": 1}
        pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], duration=100, **options)
        for index, picture in enumerate(read_animation(file.getvalue())[0]):
            assert picture.getpixel((10 * index + 5, 5)) == (255, 255, 255), kind
            assert picture.getpixel((10 * index + 15, 5)) == (200, 0, 0), kind


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_limits_of_an_animation(kind):
    data = animation(kind, 6, 100)
    assert len(read_animation(data, max_frames=6, max_pixels=6 * 1200)[0]) == 6
    with pytest.raises(MediaError, match="more than 5 frames"):
        read_animation(data, max_frames=5)
    with pytest.raises(MediaError, match="with frame 5, of 40 x 30, the video has more than the 7199 pixels"):
        read_animation(data, max_pixels=6 * 1200 - 1)


def test_what_does_not_fit_is_not_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr("models.video.upright_rgb", lambda image: decoded.append(image))
    with pytest.raises(MediaError, match="with frame 2"):
        read_animation(animation("GIF", 6, 100), max_pixels=2 * 1200)
    assert len(decoded) == 2


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", b"GIF89a", b"RIFF\x10\0\0\0WEBPVP8 "])
def test_what_is_no_animation_is_refused(data):
    with pytest.raises(MediaError):
        read_animation(data)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "PNG with a default"])
def test_a_damaged_animation_is_refused_or_shorter(kind):
    """Wherever it is cut off, and whatever bytes are wrong."""
    data = animation(kind, 4, 100) if len(kind) <= 4 else animation("PNG", 4, 100, default_image=True)
    damaged = [data[:length] for length in range(0, len(data), 7)]
    damaged += [data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :] for place in range(0, len(data), 5)]
    for file in damaged:
        with contextlib.suppress(MediaError):
            assert 1 <= len(read_animation(file)[0]) <= 4
