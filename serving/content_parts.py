"""What a message may consist of: texts, pictures and videos. Checked here as to their form; `media` decodes them."""

from __future__ import annotations

from typing import Any

from serving.errors import bad_request

MOST_FRAMES = 32  # of a video, as in the original
LOWEST_FPS, HIGHEST_FPS = 0.001, 1000


def check_content(content: Any, param: str, *, optional: bool) -> None:
    """A text, or a list of parts; `optional` content may be missing.

    Raises:
        ApiError: 400, with `param` and the part's place naming what is wrong.
    """
    if isinstance(content, str) or (content is None and optional):
        return
    if not isinstance(content, list) or not content:
        raise bad_request(f"'{param}' should be a text or a list of parts, found {content!r:.80}", param)
    for index, part in enumerate(content):
        _check_part(part, f"{param}.{index}")


def _check_part(part: Any, param: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    check = CHECKS.get(kind) if isinstance(kind, str) else None
    if check is None:
        *names, last = (f"'{name}'" for name in CHECKS)
        raise bad_request(f"'{param}.type' should be {', '.join(names)} or {last}, found {kind!r:.80}", f"{param}.type")
    check(part, param)


def _check_text(part: dict[str, Any], param: str) -> None:
    if not isinstance(part.get("text"), str):
        raise bad_request(f"'{param}.text' should be a text", f"{param}.text")


def _check_url(part: dict[str, Any], param: str) -> None:
    """A part whose URL is in an object with the name of its type."""
    place, value = f"{param}.{part['type']}", part.get(part["type"])
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise bad_request(f"'{place}' should be an object with a 'url'", place)


def _check_frames(part: dict[str, Any], param: str) -> None:
    place, frames = f"{param}.video_frames", part.get("video_frames")
    if not isinstance(frames, list) or not 1 <= len(frames) <= MOST_FRAMES:
        found = f"{len(frames)} of them" if isinstance(frames, list) else f"{frames!r:.80}"
        raise bad_request(f"'{place}' should be a list of 1 to {MOST_FRAMES} data URLs, found {found}", place)
    wrong = next((index for index, frame in enumerate(frames) if not isinstance(frame, str)), None)
    if wrong is not None:
        message = f"'{place}.{wrong}' should be a data URL, found {frames[wrong]!r:.80}"
        raise bad_request(message, f"{place}.{wrong}")
    fps = part.get("fps")
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    if fps is not None and not (is_number and LOWEST_FPS <= fps <= HIGHEST_FPS):
        message = f"'{param}.fps' should be a number from {LOWEST_FPS} to {HIGHEST_FPS}, found {fps!r:.80}"
        raise bad_request(message, f"{param}.fps")


CHECKS = {"text": _check_text, "image_url": _check_url, "video_url": _check_url, "video_frames": _check_frames}
