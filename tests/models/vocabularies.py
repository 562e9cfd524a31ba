"""A vocabulary of all bytes and a few merges, for tests of what stands between text and token ids."""

import json

from models.tokenizer import BYTE_OF_CHARACTER, Tokenizer

# Token: is it a control token? Qwen's, of which only the texts matter.
ADDED = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ <", "< |", "| >", "i m", "ð Ł"]  # the last: half an emoji
FIRST_ADDED = 256 + len(MERGES)


def small_definition() -> dict:
    """The `tokenizer.json` object: ids 0..255 are the bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    merged = {merge.replace(" ", ""): 256 + index for index, merge in enumerate(MERGES)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": FIRST_ADDED + index, "content": token, "special": control} | flags
            for index, (token, control) in enumerate(ADDED.items())
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": BYTE_OF_CHARACTER | merged, "merges": MERGES},
    }


def small_tokenizer() -> Tokenizer:
    return Tokenizer(json.dumps(small_definition()), "the small vocabulary")
