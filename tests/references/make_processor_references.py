"""Makes the reference values of the picture, video and chat template tests, from transformers.

Needs PyTorch and transformers, in an environment of their own (the tests need neither):

    pip install torch==2.13.0 transformers==5.24.0 pillow==13.0.0 jinja2==3.1.6
    python tests/references/make_processor_references.py

Writes the pictures to `processor/`, and `processor.json` with
    pictures     per file: the grid, the SHA-256 of the float32 pixel values and six of them, from
                 `Qwen2VLImageProcessorPil` with Qwen3-VL's numbers. Transparent pictures go in composited on white.
    sizes        [height, width, max_pixels, rows, columns] from its `smart_resize`
    videos       the same as pictures, of the first frames of `processor/frames.png`: each resized by the picture
                 processor, cut by `Qwen3VLVideoProcessor`, with its timestamps
    video_sizes  [frames, height, width, rows, columns] from its `smart_resize`
    prompts      conversations as transformers renders them, with this project's default template
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import normalize, rescale, resize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.utils.chat_template_utils import render_jinja_template

# Loaded past the lazy package, which asks for torchvision; only functions that do without it are called.
video_processing = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
processing = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl")

FOLDER = Path(__file__).parent / "processor"
TEMPLATE = Path(__file__).parents[2] / "models" / "qwen3_vl_chat_template.jinja"
FACTOR = 32
MIN_PIXELS = 65536
MIN_VOLUME, MAX_VOLUME = 4096, 25165824
FPS = 2.0
BUDGET = 1280  # tokens


def scene(width: int, height: int) -> np.ndarray:
    """A picture in which every place differs: gradients, a red left third, stripes; uint8 `[height, width, 3]`."""
    row, column = np.mgrid[:height, :width]
    red = np.where(column < width / 3, 230, 40 + column * 90 // width)
    green = row * 255 // height
    blue = (column // 7 + row // 5) % 2 * 120 + 60
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def alpha(width: int, height: int) -> np.ndarray:
    row, column = np.mgrid[:height, :width]
    return ((row + 2 * column) * 255 // (height + 2 * width)).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_rgb16(levels: np.ndarray) -> bytes:
    """A PNG with 16 bits per channel, which Pillow reads but does not write; `levels` uint16 `[height, width, 3]`."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def transparent_pictures() -> dict[str, bytes]:
    colours = Image.fromarray(scene(70, 50))
    rgba = Image.fromarray(np.dstack([scene(70, 50), alpha(70, 50)]), "RGBA")
    palette = colours.quantize(16)
    grey = colours.convert("L")
    first = tuple(int(level) for level in scene(70, 50)[0, 0])
    return {
        "rgba.png": encoded(rgba, "PNG"),
        "rgba.webp": encoded(rgba, "WEBP", lossless=True),
        "palette_one_transparent.png": encoded(palette, "PNG", transparency=3),
        "palette_with_alpha.png": encoded(palette, "PNG", transparency=bytes(range(0, 256, 16))),
        "grey_alpha.png": encoded(rgba.convert("LA"), "PNG"),
        "grey_one_transparent.png": encoded(grey, "PNG", transparency=grey.getpixel((0, 0))),
        "rgb_one_transparent.png": encoded(colours, "PNG", transparency=first),
        "transparent.gif": encoded(palette, "GIF", transparency=2),
    }


def opaque_pictures() -> dict[str, bytes]:
    colours = Image.fromarray(scene(70, 50))
    grey16 = scene(70, 50)[..., 1].astype(np.uint16) * 256 + 17
    frames = [Image.fromarray(np.roll(scene(70, 50), shift, axis=1)) for shift in (0, 20, 40)]
    sizes = {"1x1": (1, 1), "2x2": (2, 2), "31x31": (31, 31), "30x305": (30, 305), "305x30": (305, 30)}
    return {f"{name}.png": encoded(Image.fromarray(scene(*size)), "PNG") for name, size in sizes.items()} | {
        "640x480.jpg": encoded(Image.fromarray(scene(640, 480)), "JPEG", quality=60),
        "1800x1400.png": encoded(Image.fromarray(scene(1800, 1400)).quantize(8), "PNG", optimize=True),
        "grey.png": encoded(colours.convert("L"), "PNG"),
        "grey16.png": encoded(Image.fromarray(grey16), "PNG"),
        "rgb16.png": png_rgb16(scene(70, 50).astype(np.uint16) * 257 - 31),
        "palette.png": encoded(colours.quantize(16), "PNG"),
        "one_bit.png": encoded(colours.convert("1"), "PNG"),
        "cmyk.jpg": encoded(colours.convert("CMYK"), "JPEG", quality=80),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated.webp": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
        "plain.bmp": encoded(Image.fromarray(scene(40, 30)), "BMP"),
        "plain.tiff": encoded(Image.fromarray(scene(40, 30)), "TIFF"),
    }


def turned_pictures() -> dict[str, bytes]:
    pictures = {}
    for orientation in (1, 3, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = orientation
        pictures[f"turned_{orientation}.jpg"] = encoded(Image.fromarray(scene(96, 64)), "JPEG", quality=80, exif=exif)
    return pictures


def picture_processor(max_pixels: int) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels},
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def summary(values: np.ndarray, grid: np.ndarray) -> dict[str, Any]:
    assert values.dtype == np.float32
    samples = [*values[0, :3].tolist(), *values[-1, -3:].tolist()]
    return {
        "grid": [int(size) for size in grid],
        "sha256": hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest(),
        "samples": samples,
    }


def picture_reference(data: bytes, transparent: bool) -> dict[str, Any]:
    processor = picture_processor(BUDGET * FACTOR**2)
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if transparent:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, layer).convert("RGB")
    output = processor(images=[image], return_tensors="np")
    return summary(output["pixel_values"], output["image_grid_thw"][0])


def sizes() -> list[list[int]]:
    rng = random.Random(1)
    shapes = [(1080, 1920), (224, 224), (1040, 1040), (16, 16), (3000, 4000), (6000, 8000), (1, 200), (48, 80)]
    shapes += [(rng.randint(1, 2000), rng.randint(10, 2000)) for _ in range(150)]
    shapes = [shape for shape in shapes if max(shape) <= 200 * min(shape)]
    rows = []
    for height, width in shapes:
        for max_pixels in (16777216, BUDGET * FACTOR**2):
            result = smart_resize(height, width, FACTOR, MIN_PIXELS, max_pixels)
            rows.append([height, width, max_pixels, *result])
    return rows


def video_sizes() -> list[list[int]]:
    rng = random.Random(2)
    shapes = [(rng.randint(2, 60), rng.randint(20, 2200), rng.randint(20, 2200)) for _ in range(200)]
    shapes += [(3, 3000, 2900), (5, 2400, 2300), (2, 8, 8), (2, 31, 40), (7, 2000, 2100), (768, 720, 1280)]
    rule = video_processing.smart_resize
    return [[*shape, *rule(*shape, 2, FACTOR, MIN_VOLUME, MAX_VOLUME)] for shape in shapes]


def video_reference(frames: list[np.ndarray]) -> dict[str, Any]:
    height, width, _ = frames[0].shape
    rows, columns = video_processing.smart_resize(max(2, len(frames)), height, width, 2, FACTOR, MIN_VOLUME, MAX_VOLUME)
    mean = [0.5, 0.5, 0.5]
    pixels = []
    for frame in frames:
        resized = resize(frame.transpose(2, 0, 1), (rows, columns), Image.Resampling.BICUBIC)
        pixels.append(normalize(rescale(resized, 1 / 255), mean, mean))
    video = torch.from_numpy(np.stack(pixels))[None]
    patches, *grid = video_processing.Qwen3VLVideoProcessor.patchify(None, video, 16, 2, 2)
    times = processing.Qwen3VLProcessor._calculate_timestamps(None, list(range(len(frames))), FPS)
    return {"frames": len(frames), "timestamps": times} | summary(patches[0].numpy(), np.array(grid))


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"词": "<b>", "n": [1, 2.5, None]}}}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": 'finds "it" & more', "parameters": {"type": "object"}},
}
PICTURE, VIDEO = {"type": "image"}, {"type": "video"}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "从1数到20"}]},
    {"messages": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": ""}]},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "A "}, PICTURE, PICTURE, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": [VIDEO, {"type": "text", "text": "And this?"}]},
        ]
    },
    {
        "tools": [TOOL, TOOL],
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
            {"role": "assistant", "content": "Done.", "tool_calls": [CALL]},
        ],
    },
    {"tools": [TOOL], "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
]


def prompt_reference(conversation: dict[str, Any]) -> dict[str, Any]:
    messages, tools = conversation["messages"], conversation.get("tools")
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=TEMPLATE.read_text(), add_generation_prompt=True
    )
    return {"messages": messages, "tools": tools, "text": texts[0]}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    transparent = transparent_pictures()
    pictures = transparent | opaque_pictures() | turned_pictures()
    for name, data in pictures.items():
        (FOLDER / name).write_bytes(data)
    frames = [np.roll(scene(100, 70), 9 * index, axis=0) for index in range(5)]
    Image.fromarray(np.concatenate(frames)).save(FOLDER / "frames.png", optimize=True)
    references = {
        "pictures": {name: picture_reference(data, name in transparent) for name, data in pictures.items()},
        "sizes": sizes(),
        "videos": [video_reference(frames[:count]) for count in (1, 2, 3, 5)],
        "video_sizes": video_sizes(),
        "prompts": [prompt_reference(conversation) for conversation in CONVERSATIONS],
    }
    text = json.dumps(references, ensure_ascii=False)
    (Path(__file__).parent / "processor.json").write_text(text.replace("], [", "],\n[") + "\n")


if __name__ == "__main__":
    main()
