"""`models.load` and the model it returns, as researchers use them; and the generate command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import models
from models import CheckpointError, ConfigError, ContextLengthError, PromptError, SamplingParams
from models.config import parse_config
from models.generate import main
from models.model import PRETRAINED, _context, _end_tokens

IDS_ONLY = Path(__file__).parents[1] / "references" / "parity" / "dense_tied"


@pytest.fixture(scope="module")
def tiny() -> models.LoadedModel:
    return models.load("tiny-vl", max_context=512)


@pytest.fixture(scope="module")
def ids_only() -> models.LoadedModel:
    """A checkpoint without a vocabulary."""
    return models.load(IDS_ONLY)


QUESTION = "What can you do?"


def text(steps) -> str:
    return "".join(step.text for step in steps)


@pytest.fixture(scope="module")
def answer(tiny) -> str:
    """The model's answer to the question that most tests ask."""
    answer = text(tiny.generate(QUESTION))
    assert answer.startswith("I can count, do small sums")
    return answer


def test_a_question_a_conversation_and_a_prompt_are_the_same(tiny, answer):
    messages = [{"role": "user", "content": QUESTION}]
    answers = [text(tiny.generate(prompt)) for prompt in (QUESTION, messages, tiny.prompt(messages))]
    assert answers == [answer] * 3


def test_token_ids_give_the_same_tokens_as_their_text(tiny, answer):
    ids = tiny.prompt([{"role": "user", "content": QUESTION}]).token_ids
    assert text(tiny.generate(ids.tolist())) == answer


def test_a_question_with_a_picture(tiny):
    image = Image.new("RGB", (64, 64), "white")
    prompt = tiny.prompt([{"role": "user", "content": [{"type": "image", "image": image}]}])
    assert len(prompt.visuals) == 1
    assert len(list(tiny.generate("What is in this picture?", images=[image], max_tokens=3, ignore_eos=True))) == 3


def test_steps_end_with_the_end_token_and_tell_margin_and_logprob(tiny):
    steps = list(tiny.generate(QUESTION))
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["stop"]
    assert steps[-1].token_id in tiny.end_tokens
    assert steps[-1].text == ""
    assert all(step.margin >= 0 and step.logprob <= 0 for step in steps)


def test_logits_are_those_the_steps_chose_from(tiny):
    ids = tiny.prompt([{"role": "user", "content": "Hello"}]).token_ids
    steps = list(tiny.generate(ids, max_tokens=4))
    grown = np.concatenate([ids, [step.token_id for step in steps]])
    logits = tiny.logits(grown)[len(ids) - 1 : -1]
    assert logits.argmax(axis=1).tolist() == [step.token_id for step in steps]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6}),
        ({}, {"eos_token_id": 7, "text_config": {"eos_token_id": 8}}, {7}),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 8}}, {8}),
        (None, {"text_config": {"eos_token_id": [8, 9]}}, {8, 9}),
        (None, {"text_config": {}}, set()),
    ],
)
def test_the_end_is_found_wherever_a_checkpoint_states_it(tmp_path, generation, config, ends):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _end_tokens(tmp_path) == ends


def test_a_context_that_yarn_reaches_is_taken(moe_values):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse_config(moe_values | {"max_position_embeddings": 40960, "rope_scaling": yarn})
    assert _context(config, 131072) == 131072
    with pytest.raises(ConfigError, match=r"must lie in 2\.\.131072"):
        _context(config, 131073)


def test_a_template_that_writes_an_unknown_token_is_refused(tmp_path):
    folder = shutil.copytree(PRETRAINED / "tiny-vl", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja.*eos_token.*'</s>'"):
        models.load(folder)


def test_ignoring_the_end_goes_on(tiny):
    assert len(list(tiny.generate("Hello", max_tokens=40, ignore_eos=True))) == 40


def test_a_stop_string_ends_the_text_before_it(tiny):
    steps = list(tiny.generate("Count from 1 to 9", stop=["4, 5"]))
    assert text(steps) == "1, 2, 3, "
    assert steps[-1].finish_reason == "stop"


def test_top_logprobs_are_best_first(tiny):
    (step,) = tiny.generate("Hello", max_tokens=1, sampling=SamplingParams(top_logprobs=4))
    assert len(step.top_logprobs) == 4
    assert step.top_logprobs[0] == (step.token_id, pytest.approx(step.logprob))
    assert [logprob for _, logprob in step.top_logprobs] == sorted((p for _, p in step.top_logprobs), reverse=True)


def test_bfloat16_weights_are_kept_as_stored(answer):
    """The small models are stored in bfloat16, so that keeping them so changes nothing."""
    half = models.load("tiny-vl", dtype="bfloat16", max_context=512)
    assert text(half.generate(QUESTION)) == answer


def test_a_preset_with_random_weights_speaks_qwen(monkeypatch):
    """A published shape, made small, with the real vocabulary."""
    values = json.loads(json.dumps(models.presets.PRESETS["qwen3-vl-2b"]))
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    values["text_config"] |= small | {"num_key_value_heads": 1}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
    values["vision_config"] |= vision | {"deepstack_visual_indexes": [0]}
    monkeypatch.setitem(models.presets.PRESETS, "qwen3-vl-2b", values)
    model = models.load("qwen3-vl-2b", weights="random", max_context=256)
    prompt = model.prompt([{"role": "user", "content": "Hi"}])
    assert prompt.token_ids.tolist() == [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198]
    assert model.end_tokens == {151645, 151643}
    assert len(list(model.generate(prompt, max_tokens=3, ignore_eos=True))) == 3


def test_a_model_without_a_vocabulary_takes_ids(ids_only):
    steps = list(ids_only.generate([1, 2, 3], max_tokens=4))
    assert [step.text for step in steps] == [""] * 4
    with pytest.raises(PromptError, match="no tokenizer"):
        ids_only.generate("Hello")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path_or_preset": "no-such-model"}, ConfigError, "neither a folder.*tiny-vl.*qwen3-vl-2b"),
        ({"path_or_preset": "qwen3-vl-2b"}, ConfigError, "weights='random'"),
        ({"path_or_preset": "tiny-vl", "weights": "zeros"}, ConfigError, "'zeros'"),
        ({"path_or_preset": "tiny-vl", "dtype": "float8"}, ConfigError, "float32, bfloat16"),
        ({"path_or_preset": "tiny-vl", "quant": "q3"}, ConfigError, "quant must be one of q4, q4-head-q8, q8"),
        ({"path_or_preset": "tiny-vl", "kv": "int4"}, ConfigError, "kv must be one of float32, bfloat16, int8"),
        ({"path_or_preset": "tiny-vl", "max_context": 1}, ConfigError, "max_context must lie in"),
        ({"path_or_preset": "tiny-vl", "max_context": 10**6}, ConfigError, "max_context must lie in"),
    ],
)
def test_arguments_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        models.load(**arguments)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: "),
        ("generation_config.json", "[", "generation_config.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("preprocessor_config.json", '{"size": {}}', "preprocessor_config.json"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    shutil.copytree(PRETRAINED / "tiny-vl", tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        models.load(tmp_path / "model")


def test_prompts_that_are_refused(tiny):
    with pytest.raises(ContextLengthError, match=r"has 6\d\d tokens, but the context is limited to 512"):
        tiny.prompt([{"role": "user", "content": "1 " * 300}])
    with pytest.raises(PromptError, match="empty"):
        tiny.generate([])
    with pytest.raises(PromptError, match=r"must lie in 0\.\.2047"):
        tiny.generate([5, 2048])
    with pytest.raises(PromptError, match="one row of integers"):
        tiny.logits([[1, 2]])
    with pytest.raises(PromptError, match="fewer placeholder tokens"):
        tiny.logits([1, 2], pixel_values=np.zeros((4, 1536)), image_grid_thw=[[1, 2, 2]])
    with pytest.raises(ConfigError, match="max_tokens"):
        tiny.generate("Hello", max_tokens=0)
    for images in (Image.new("RGB", (64, 64)), ["shapes.png"]):
        with pytest.raises(TypeError, match="images should be a list of PIL pictures"):
            tiny.generate("What is this?", images=images)
    with pytest.raises(TypeError, match="sampling should be models"):
        tiny.generate("Hello", sampling={"temperature": 1})


def test_pictures_may_come_one_by_one(tiny):
    pictures = [Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), "red")]
    listed, one_by_one, none = (
        [step.token_id for step in tiny.generate("What is in this picture?", max_tokens=4, images=images)]
        for images in (pictures, iter(pictures), ())
    )
    assert one_by_one == listed != none


def test_the_command_prints_the_answer(capsys, answer):
    assert main(["--model", "tiny-vl", "--max-context", "512", QUESTION]) == 0
    printed = capsys.readouterr()
    assert printed.out == answer + "\n"
    assert "tokens, stop" in printed.err


def test_the_command_names_what_is_wrong(capsys, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    assert main(["--model", "tiny-vl", "hi", "--image", str(tmp_path / "broken.png")]) == 2
    assert "error: the picture is" in capsys.readouterr().err
    assert main(["--model", "nowhere", "hi"]) == 2
    assert "error: 'nowhere' is neither" in capsys.readouterr().err
