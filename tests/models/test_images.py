"""Pictures against transformers' processor (see tests/references/make_processor_references.py), and files that lie."""

import contextlib
import hashlib
import io
import json
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.errors import CheckpointError, ConfigError, MediaError
from models.images import MAX_PIXELS, ImageProcessor, open_image, picture_size, smart_resize, upright_rgb
from tests.models.peak_memory import forget_peak, peak_bytes

REFERENCES = Path(__file__).parents[1] / "references"
FOLDER = REFERENCES / "processor"
REFERENCE = json.loads((REFERENCES / "processor.json").read_text())
PUBLISHED = ImageProcessor.from_folder(None)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey PNG of any claimed size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("name", REFERENCE["pictures"])
def test_equals_transformers_to_the_bit(name):
    expected = REFERENCE["pictures"][name]
    visual = PUBLISHED(open_image((FOLDER / name).read_bytes()))
    assert list(visual.grid) == expected["grid"]
    assert visual.patches.dtype == np.float32
    samples = [*visual.patches[0, :3].tolist(), *visual.patches[-1, -3:].tolist()]
    assert samples == expected["samples"]
    assert hashlib.sha256(visual.patches.tobytes()).hexdigest() == expected["sha256"]


def test_smart_resize_equals_transformers():
    for height, width, max_pixels, *expected in REFERENCE["sizes"]:
        assert list(smart_resize(height, width, 32, 65536, max_pixels)) == expected, (height, width, max_pixels)


@pytest.mark.parametrize(("name", "tokens"), [("1x1.png", 64), ("30x305.png", 78), ("640x480.jpg", 300)])
def test_small_pictures_grow_to_the_least_area(name, tokens):
    visual = PUBLISHED(open_image((FOLDER / name).read_bytes()))
    assert visual.tokens(2) == tokens
    assert visual.patches.shape == (4 * tokens, 3 * 2 * 16 * 16)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.floats(1, 200), st.booleans(), st.integers(1, 1500))
def test_the_token_budget_is_never_exceeded(short, aspect, tall, budget):
    height, width = (int(short * aspect), short) if tall else (short, int(short * aspect))
    processor = ImageProcessor.from_folder(None, max_image_tokens=budget)
    rows, columns = smart_resize(height, width, 32, processor.min_pixels, processor.max_pixels)
    assert rows % 32 == columns % 32 == 0
    assert 1 <= rows * columns // 1024 <= processor.max_tokens <= budget


def test_exif_turns_the_picture_before_anything_else():
    """The left third of the stored picture is red."""
    reddest = {}
    for orientation in (1, 3, 6, 8):
        image = open_image((FOLDER / f"turned_{orientation}.jpg").read_bytes())
        red = np.asarray(image, np.int32)[..., 0]
        sides = {"left": red[:, :20], "right": red[:, -20:], "top": red[:20], "bottom": red[-20:]}
        reddest[orientation] = (image.size, max(sides, key=lambda side: sides[side].mean()))
    assert reddest == {
        1: ((96, 64), "left"),
        3: ((96, 64), "right"),
        6: ((64, 96), "top"),
        8: ((64, 96), "bottom"),
    }


def test_the_processor_turns_and_flattens_pictures_that_a_program_brings():
    data = (FOLDER / "turned_6.jpg").read_bytes()
    assert PUBLISHED(Image.open(io.BytesIO(data))).content_hash == PUBLISHED(open_image(data)).content_hash
    data = (FOLDER / "rgba.png").read_bytes()
    assert PUBLISHED(Image.open(io.BytesIO(data))).content_hash == PUBLISHED(open_image(data)).content_hash


def test_damaged_exif_does_not_cost_the_picture():
    data = encoded(Image.new("RGB", (40, 30), "red"), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0")
    assert open_image(data).size == (40, 30)


def test_a_picture_that_is_as_it_should_be_is_not_copied():
    picture = Image.new("RGB", (2, 1))
    assert upright_rgb(picture) is picture


def test_transparent_becomes_white_and_half_transparent_lighter():
    image = Image.new("RGBA", (2, 1))
    image.putpixel((0, 0), (200, 0, 0, 0))
    image.putpixel((1, 0), (200, 0, 0, 128))
    opened = open_image(encoded(image, "PNG"))
    assert opened.mode == "RGB"
    assert opened.getpixel((0, 0)) == (255, 255, 255)
    assert opened.getpixel((1, 0)) == pytest.approx((227, 127, 127), abs=1)


def test_animations_give_their_first_frame():
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
        red, _, blue = open_image(data).getpixel((5, 5))
        assert red > 200 > 50 > blue, kind


def test_an_enormous_picture_is_refused_by_its_header():
    data = png(30_000, 30_000, b"\0" * 30_001 * 100)
    forget_peak()
    before = peak_bytes()
    with pytest.raises(MediaError, match=f"at most {MAX_PIXELS}"):
        open_image(data)
    assert peak_bytes() - before < 100 << 20  # the bitmap has 900 MB


@pytest.mark.parametrize("size", [(8000, 7000), (10_000, 9_000), (14_000, 14_000)])
def test_more_pixels_than_the_limit_are_refused_without_a_warning(size):
    """Pillow warns from 89 million pixels on and raises its own error from 179 million on."""
    with pytest.raises(MediaError, match=f"at most {MAX_PIXELS}"):
        open_image(png(*size))


def test_the_limit_is_the_callers():
    data = encoded(Image.new("L", (100, 100)), "PNG")
    assert open_image(data, 10_000).size == (100, 100)
    for read in (open_image, picture_size):
        with pytest.raises(MediaError, match="100 x 100 pixels; at most 9999"):
            read(data, 9_999)


def test_the_size_is_known_without_decoding():
    """Even of a file that is cut off."""
    data = encoded(Image.new("RGB", (70, 50)), "PNG")
    assert picture_size(data[:60]) == (70, 50)
    with pytest.raises(MediaError, match="damaged"):
        open_image(data[:60])


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (402, 2)])
def test_more_than_two_hundred_to_one_is_refused(size):
    with pytest.raises(MediaError, match="200 times"):
        open_image(encoded(Image.new("L", size), "PNG"))
    with pytest.raises(MediaError, match="200 times"):
        PUBLISHED(Image.new("RGB", size))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (b"hello", "none of the formats PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of the formats"),
        (b"\x89PNG\r\n\x1a\n", "damaged"),
        (encoded(Image.new("RGB", (8, 8)), "ICO"), "none of the formats"),
        (encoded(Image.new("RGB", (8, 8)), "PPM"), "none of the formats"),
    ],
)
def test_what_is_no_picture_is_refused(data, message):
    with pytest.raises(MediaError, match=message):
        open_image(data)


@pytest.mark.parametrize("name", ["640x480.jpg", "rgb16.png", "animated.gif", "rgba.webp", "plain.bmp", "plain.tiff"])
def test_a_file_cut_off_anywhere_is_a_media_error_or_a_picture(name):
    """Never another exception. A fifth of the file holds no whole picture in any format."""
    data = (FOLDER / name).read_bytes()
    with pytest.raises(MediaError, match="damaged"):
        open_image(data[: len(data) // 5])
    for cut in range(0, len(data), max(1, len(data) // 60)):
        with contextlib.suppress(MediaError):
            assert open_image(data[:cut]).mode == "RGB"


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.sampled_from(sorted(REFERENCE["pictures"])), st.data())
def test_a_damaged_file_is_a_media_error_or_a_picture(name, data):
    content = bytearray((FOLDER / name).read_bytes())
    for place, value in data.draw(
        st.dictionaries(st.integers(0, len(content) - 1), st.integers(0, 255), min_size=1)
    ).items():
        content[place] = value
    with contextlib.suppress(MediaError):
        assert open_image(bytes(content), 4_000_000).mode == "RGB"


def test_pictures_can_be_opened_in_several_threads():
    names = ["640x480.jpg", "rgba.png", "animated.gif"]
    expected = [open_image((FOLDER / name).read_bytes()).tobytes() for name in names]
    found: list[list[bytes]] = []

    def work() -> None:
        found.append([open_image((FOLDER / name).read_bytes()).tobytes() for name in names])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_equal_pictures_have_equal_hashes():
    picture = Image.new("RGB", (300, 300), "green")
    first, again = PUBLISHED(picture), PUBLISHED(picture.copy())
    assert first.content_hash == again.content_hash
    picture.putpixel((150, 150), (0, 129, 1))
    assert PUBLISHED(picture).content_hash != first.content_hash
    # All patches equal, another grid.
    assert PUBLISHED(Image.new("RGB", (256, 512))).content_hash != PUBLISHED(Image.new("RGB", (512, 256))).content_hash


def test_patches_show_merge_blocks_and_channels_in_order():
    """Row k of the patches is the k-th patch in merge-block order, and a patch goes channel, frame, row, column."""
    processor = ImageProcessor(2, 2, 2, 1, 10**6, (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))
    levels = np.arange(8 * 4 * 3, dtype=np.uint8).reshape(4, 8, 3)
    visual = processor(Image.fromarray(levels))
    assert visual.grid == (1, 2, 4)
    patches = np.rint(visual.patches).astype(int).reshape(8, 3, 2, 2, 2)
    corners = [(0, 0), (0, 2), (2, 0), (2, 2), (0, 4), (0, 6), (2, 4), (2, 6)]
    for patch, (row, column) in zip(patches, corners, strict=True):
        for frame in range(2):
            expected = levels[row : row + 2, column : column + 2].transpose(2, 0, 1)
            np.testing.assert_array_equal(patch[:, frame], expected)


def test_settings_come_from_the_folder(tmp_path):
    values = {
        "size": {"shortest_edge": 1024, "longest_edge": 9000},
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 2048, "longest_edge": 99999}})
    )
    processor = ImageProcessor.from_folder(tmp_path)
    assert processor == ImageProcessor(
        8, 2, 2, 1024, 9000, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), min_volume=2048, max_volume=99999
    )
    assert ImageProcessor.from_folder(tmp_path, max_image_tokens=20).max_pixels == 20 * 16**2


def test_settings_in_the_older_spelling(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 2048, "max_pixels": 8192}))
    processor = ImageProcessor.from_folder(tmp_path)
    assert (processor.min_pixels, processor.max_pixels) == (2048, 8192)


def test_without_a_file_the_published_settings_hold(tmp_path):
    processor = ImageProcessor.from_folder(tmp_path)
    assert processor == ImageProcessor(16, 2, 2, 65536, 1280 * 1024, (0.5,) * 3, (0.5,) * 3, 4096, 25165824)
    assert processor.max_tokens == 1280
    assert ImageProcessor.from_folder(tmp_path, max_image_tokens=10**6).max_pixels == 16777216


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"size": {"longest_edge": 4096}}', "shortest_edge.*missing"),
        ('{"patch_size": 0}', "positive whole numbers"),
        ('{"merge_size": "2"}', "positive whole numbers"),
        ('{"size": 5}', "cannot be read"),
    ],
)
def test_unusable_settings_name_their_file(tmp_path, content, message):
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json.*{message}"):
        ImageProcessor.from_folder(tmp_path)


def test_a_budget_below_one_token_is_refused():
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        ImageProcessor.from_folder(None, max_image_tokens=0)
