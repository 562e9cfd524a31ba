"""Pictures and videos: taken from data URLs alone, refused by name, and decoded for admitted requests only."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import struct
import threading
import weakref
import zlib

import pytest
from PIL import Image

from models import images
from models import video as video_module
from serving import media

from .chat_client import COMPLETIONS, data_url, frames, text_of
from .conftest import PATIENCE, Server, scripted_server
from .scripted_model import ScriptedModel

PLACE = "messages.0.content.0.image_url.url"


def png(width: int = 64, height: int = 64, **options) -> bytes:
    """A red picture."""
    file = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), (width, height), options.pop("colour", "red")).save(file, "PNG", **options)
    return file.getvalue()


def about(*urls: str, **fields) -> dict:
    """A request with pictures and a question."""
    pictures = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return {"messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": "what?"}]}], **fields}


async def refused(server: Server, request: dict) -> dict:
    """The error of a request that is refused, the same in both modes."""
    errors = []
    for stream in (False, True):
        response = await server.client.post(COMPLETIONS, json=request | {"stream": stream})
        assert response.status_code == 400, response.text
        errors.append(response.json()["error"])
    assert errors[0] == errors[1]
    assert server.engine.active == server.engine.queued == 0
    return errors[0]


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "image/png;charset=utf-8", "application/octet-stream", ""])
async def test_pictures_become_visual_tokens(server, kind):
    """What the bytes are counts, not what the URL says of them."""
    request = about(data_url(png(), kind), data_url(png(30, 305)), stream_options={"include_tokens": True})
    answer = (await server.client.post(COMPLETIONS, json=request)).json()
    assert answer["choices"][0]["message"]["content"] == "what?"
    pad = server.model.tokenizer.id_of("<|image_pad|>")
    assert answer["history_tokens"].count(pad) > 64


async def test_a_streamed_answer_to_a_picture(server):
    response = await server.client.post(COMPLETIONS, json=about(data_url(png()), stream=True))
    assert text_of(frames(response.text)) == "what?"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/x.png",
        "https://127.0.0.1:{port}/x.png",
        "//127.0.0.1:{port}/x.png",
        "ftp://127.0.0.1:{port}/x.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "x.png",
    ],
)
async def test_nothing_is_ever_fetched(server, url):
    connections = []
    listener = await asyncio.start_server(lambda reader, writer: connections.append(writer), "127.0.0.1", 0)
    url = url.format(port=listener.sockets[0].getsockname()[1])
    error = await refused(server, about(url))
    assert error["param"] == PLACE
    assert "data URL" in error["message"]
    listener.close()
    assert not connections


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,rawbytes",
        "data:image/png;base64,",
        "data:image/png;base64,####",
        "data:image/png;base64,AAA",
        "data:image/png;base64,é",
        data_url(b"not a picture"),
        data_url(png()[:60]),
        data_url(png(1, 300)),
        data_url(b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "image/svg+xml"),
    ],
)
async def test_pictures_that_cannot_be_used(server, url):
    assert (await refused(server, about(data_url(png()), url)))["param"] == PLACE.replace("content.0", "content.1")


def bomb(width: int, height: int) -> bytes:
    """A small file that says it holds a huge picture of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + width // 8) * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture
def undecoded(monkeypatch):
    """Nothing may be decoded."""

    def fail(image: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(images, "upright_rgb", fail)
    monkeypatch.setattr(video_module, "upright_rgb", fail)


@pytest.mark.usefixtures("undecoded")
async def test_a_tiny_file_with_an_enormous_picture_is_refused_by_its_header(server):
    error = await refused(server, about(data_url(bomb(30_000, 30_000))))
    assert "at most 50000000" in error["message"]
    assert error["param"] == PLACE


LARGE = data_url(bomb(7000, 7000))
PICTURE = {"type": "image_url", "image_url": {"url": LARGE}}
FRAMES = {"type": "video_frames", "video_frames": [data_url(bomb(7000, 3500))] * 2}
FILMED = {"type": "video_url", "video_url": {"url": data_url(bomb(2000, 2000))}}  # one frame, but there might be 32


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize(
    ("parts", "place"),
    [
        ([PICTURE] * 16, "4.image_url.url"),
        ([FRAMES] * 5, "4.video_frames.0"),
        ([FILMED] * 5, "4.video_url.url"),
        ([FRAMES, PICTURE, FILMED, PICTURE, FRAMES], "4.video_frames.0"),
    ],
)
async def test_pictures_that_are_too_large_together_are_refused_by_their_headers(server, parts, place):
    error = await refused(server, filmed(*parts))
    assert error["param"] == f"messages.0.content.{place}"
    assert "pixels; together they may have 200000000" in error["message"]


async def test_pictures_that_the_context_has_no_room_for_are_not_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(media, "open_image", lambda data: decoded.append(1) or Image.new("RGB", (64, 64)))
    async with scripted_server(ScriptedModel(max_context=100)) as server:
        response = await server.client.post(COMPLETIONS, json=about(*[data_url(png())] * 16))
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert len(decoded) == 2


async def test_one_large_picture_is_in_memory_at_a_time(server, monkeypatch):
    """As it is decoded, the one before has been cut into patches and is gone."""
    decoded_pictures: list[weakref.ref[Image.Image]] = []
    counts = []

    def alive() -> int:
        return sum(picture() is not None for picture in decoded_pictures)

    def noting(decode):
        def decoded(*arguments):
            counts.append(alive())
            found = decode(*arguments)
            decoded_pictures.extend(map(weakref.ref, [found] if isinstance(found, Image.Image) else found[0]))
            return found

        return decoded

    for name in ("open_image", "read_animation"):
        monkeypatch.setattr(media, name, noting(getattr(media, name)))
    picture = {"type": "image_url", "image_url": {"url": data_url(png())}}
    animated = {"type": "video_url", "video_url": {"url": animation("GIF", 2)}}
    shown, _ = await prompt_of(server, filmed(picture, video(2), animated, picture))
    assert shown.count("[") == 4
    assert counts == [0, 0, 1, 0, 0]  # a video's own frames are together
    assert len(decoded_pictures) == 6
    assert alive() == 0


async def test_too_many_pictures(server):
    assert "16" in (await refused(server, about(*[data_url(png())] * 17)))["message"]


async def test_only_admitted_requests_are_decoded(monkeypatch):
    """A burst beyond the queue costs nothing."""
    decoded = []
    monkeypatch.setattr(media, "open_image", lambda data: decoded.append(1) or Image.new("RGB", (64, 64)))
    async with scripted_server(max_queued=1) as server:
        server.model.hold_at = 1
        request = about(data_url(png()))
        burst = [asyncio.create_task(server.client.post(COMPLETIONS, json=request)) for _ in range(8)]
        await server.until(lambda: sum(task.done() for task in burst) == 6)
        assert {task.result().status_code for task in burst if task.done()} == {429}
        await server.held()
        server.model.gate.set()
        answers = await asyncio.gather(*burst)
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 6
    assert len(decoded) == 2


async def test_decoding_does_not_hold_the_event_loop(server, monkeypatch):
    decoding, answered = threading.Event(), threading.Event()

    def decode(data: bytes) -> Image.Image:
        decoding.set()
        assert answered.wait(PATIENCE)
        return Image.new("RGB", (64, 64))

    monkeypatch.setattr(media, "open_image", decode)
    slow = asyncio.create_task(server.client.post(COMPLETIONS, json=about(data_url(png()))))
    await server.until(decoding.is_set)
    assert (await server.client.get("/health")).json()["queued"] == 1
    answered.set()
    assert (await slow).status_code == 200


async def test_what_a_picture_is_known_by_is_computed_before_the_engine_takes_it(server, monkeypatch):
    threads = []
    sha256 = hashlib.sha256

    def noting(*arguments):
        threads.append(threading.current_thread().name)
        return sha256(*arguments)

    monkeypatch.setattr(images.hashlib, "sha256", noting)
    picture = {"type": "image_url", "image_url": {"url": data_url(png())}}
    response = await server.client.post(COMPLETIONS, json=filmed(picture, video(3)))
    assert response.status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["prepare"] * 2


VIDEO = "messages.0.content.0.video_frames"
FILE = "messages.0.content.0.video_url.url"
MP4 = data_url(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", "video/mp4")


def filmed(*parts: dict, **fields) -> dict:
    """A request with parts and a question."""
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}], **fields}


def video(count: int, **fields) -> dict:
    """A part with frames that grow darker."""
    frames = [data_url(png(96, 64, colour=(200 - 6 * index, 0, 0))) for index in range(count)]
    return {"type": "video_frames", "video_frames": frames, **fields}


def animation(kind: str, count: int, duration: float = 250) -> str:
    """An animated file with the same frames."""
    pictures = [Image.new("RGB", (96, 64), (200 - 6 * index, 0, 0)) for index in range(count)]
    file = io.BytesIO()
    pictures[0].save(file, kind, save_all=True, append_images=pictures[1:], duration=duration)
    return data_url(file.getvalue(), f"image/{kind.lower()}")


async def prompt_of(server: Server, request: dict) -> tuple[str, int]:
    """What the model sees between the marks of the user's turn, with every visual token as `.`; the prompt's length."""
    options = {"max_tokens": 1, "stream_options": {"include_tokens": True}}
    response = await server.client.post(COMPLETIONS, json=request | options)
    assert response.status_code == 200, response.text
    answer, tokenizer = response.json(), server.model.tokenizer
    shown = {tokenizer.id_of("<|video_pad|>"): ".", tokenizer.id_of("<|vision_start|>"): "["}
    shown |= {tokenizer.id_of("<|vision_end|>"): "]", tokenizer.id_of("<|image_pad|>"): "#"}
    text = "".join(shown.get(token) or tokenizer.decode([token]) for token in answer["history_tokens"])
    tokens = answer["usage"]["prompt_tokens"]
    return text.partition("user\n")[2].partition("what?")[0], tokens


@pytest.mark.parametrize(
    ("count", "fields", "times"),
    [
        (1, {}, [0.0]),
        (4, {}, [0.2, 1.2]),  # 0.25 and 1.25, as Python and transformers round them
        (5, {"fps": None}, [0.2, 1.2, 2.0]),
        (4, {"fps": 0.5}, [1.0, 5.0]),
        (3, {"fps": 10}, [0.1, 0.2]),
    ],
)
async def test_frames_become_groups_with_times(server, count, fields, times):
    shown, length = await prompt_of(server, filmed(video(count, **fields)))
    assert shown == "".join(f"<{seconds} seconds>[......]" for seconds in times)
    plain, without = await prompt_of(server, filmed({"type": "text", "text": ""}))
    assert plain == ""
    assert length - without == len(shown)


@pytest.mark.parametrize(
    ("kind", "times"), [("GIF", [0.1, 0.6, 1.0]), ("WEBP", [0.1, 0.6, 1.0]), ("PNG", [0.1, 0.6, 1.0])]
)
async def test_an_animation_is_a_video_at_its_own_pace(server, kind, times):
    request = filmed({"type": "video_url", "video_url": {"url": animation(kind, 5)}})
    frames = filmed(video(5, fps=4))
    shown = await prompt_of(server, request)
    assert shown == await prompt_of(server, frames)
    assert shown[0] == "".join(f"<{seconds} seconds>[......]" for seconds in times)


async def test_videos_and_pictures_side_by_side(server):
    picture = {"type": "image_url", "image_url": {"url": data_url(png())}}
    shown, _ = await prompt_of(server, filmed(picture, video(2), video(1), picture))
    assert shown == f"[{'#' * 64}]<0.2 seconds>[......]<0.0 seconds>[......][{'#' * 64}]"


async def test_a_video_costs_no_more_than_a_picture(server):
    """The scripted model's budget is 64 tokens: the more frames, the smaller they become."""
    for groups in (1, 4, 16):
        large = [data_url(png(400, 300))] * 2 * groups
        shown, _ = await prompt_of(server, filmed({"type": "video_frames", "video_frames": large}))
        [tokens] = {len(group) for group in re.findall(r"\[(\.+)\]", shown)}
        assert shown.count("[") == groups
        assert 32 <= groups * tokens <= 64


async def test_a_streamed_answer_to_a_video(server):
    response = await server.client.post(COMPLETIONS, json=filmed(video(3), stream=True))
    assert text_of(frames(response.text)) == "what?"


@pytest.mark.parametrize(
    ("part", "place", "message"),
    [
        ({}, VIDEO, "1 to 32 data URLs, found None"),
        ({"video_frames": []}, VIDEO, "found 0 of them"),
        ({"video_frames": [data_url(png())] * 33}, VIDEO, "found 33 of them"),
        ({"video_frames": "data:"}, VIDEO, "found 'data:'"),
        ({"video_frames": [data_url(png()), 5]}, f"{VIDEO}.1", "found 5"),
        ({"video_frames": [data_url(png()), "http://127.0.0.1/x.png"]}, f"{VIDEO}.1", "not fetched"),
        ({"video_frames": [data_url(png()), data_url(b"x")]}, f"{VIDEO}.1", "damaged"),
        ({"video_frames": [data_url(png()), data_url(png()[:60])]}, f"{VIDEO}.1", "damaged"),
        ({"video_frames": [data_url(png(1, 300))]}, f"{VIDEO}.0", "200 times"),
        (
            {"video_frames": [data_url(png()), data_url(png()), data_url(png(64, 65))]},
            f"{VIDEO}.2",
            "this frame is 64 x 65 and the first one 64 x 64",
        ),
        ({"video_frames": [data_url(png())], "fps": 0}, "messages.0.content.0.fps", "0.001 to 1000, found 0"),
        ({"video_frames": [data_url(png())], "fps": True}, "messages.0.content.0.fps", "found True"),
        ({"video_frames": [data_url(png())], "fps": "2"}, "messages.0.content.0.fps", "found '2'"),
        ({"type": "video_url"}, "messages.0.content.0.video_url", "an object with a 'url'"),
        ({"type": "video_url", "video_url": {"url": MP4}}, FILE, "send their frames"),
        ({"type": "video_url", "video_url": {"url": "https://127.0.0.1/x.mp4"}}, FILE, "not fetched"),
        ({"type": "video_url", "video_url": {"url": animation("GIF", 33)}}, FILE, "more than 32 frames"),
        ({"type": "video_url", "video_url": {"url": data_url(png(1, 300))}}, FILE, "200 times"),
    ],
)
async def test_videos_that_cannot_be_used(server, part, place, message):
    error = await refused(server, filmed({"type": "video_frames"} | part))
    assert error["param"] == place
    assert message in error["message"]
    assert "\n" not in error["message"]


async def test_many_frames_with_many_pixels_are_refused_before_any_is_decoded(server, monkeypatch):
    monkeypatch.setattr(media, "open_image", lambda data: pytest.fail("decoded"))
    part = {"type": "video_frames", "video_frames": [data_url(bomb(4000, 4000))] * 4}
    error = await refused(server, filmed(part))
    assert error["param"] == f"{VIDEO}.3"
    assert "the video has 64000000 pixels; all frames together may have 50000000" in error["message"]


async def test_too_many_pictures_and_videos(server):
    parts = [{"type": "image_url", "image_url": {"url": data_url(png())}}] * 8 + [video(1)] * 9
    assert "16 pictures and videos, found 17" in (await refused(server, filmed(*parts)))["message"]


async def test_a_video_longer_than_the_context():
    async with scripted_server(ScriptedModel(max_context=100)) as server:
        error = await refused(server, filmed(video(32)))
        assert error["code"] == "context_length_exceeded"
        assert "limited to 100" in error["message"]


async def test_a_text_model_takes_no_videos(server):
    server.model._prompts.processor = None
    for part in (video(1), {"type": "video_url", "video_url": {"url": animation("GIF", 2)}}):
        assert "takes text only" in (await refused(server, filmed(part)))["message"]


async def test_only_admitted_requests_have_their_videos_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(media, "open_image", lambda data: decoded.append(1) or Image.new("RGB", (64, 64)))
    async with scripted_server(max_queued=1) as server:
        server.model.hold_at = 1
        burst = [asyncio.create_task(server.client.post(COMPLETIONS, json=filmed(video(2)))) for _ in range(6)]
        await server.until(lambda: sum(task.done() for task in burst) == 4)
        await server.held()
        server.model.gate.set()
        answers = await asyncio.gather(*burst)
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 4
    assert len(decoded) == 4
