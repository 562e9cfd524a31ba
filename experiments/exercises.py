"""What the small models were taught, asked of a model: held-out conversations, its answers, and how many are right."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from experiments.bench import Sample
from experiments.tiny_data import conversations
from experiments.tiny_models import TINY_MODELS, TINY_MOE, TINY_VL
from experiments.tiny_tasks import Message, Task
from models import LoadedModel
from models.batch import BatchLimits
from models.generation import Generation, Step

TEXTS, PICTURES = "texts", "pictures"
ROWS = 8
SPARE = 4  # tokens that an answer may have more than the right one: it is wrong by then


def tasks_of(model: str) -> dict[str, Task]:
    """What a model can be asked: a small one its exercises, any other nothing, since it does not know how they want to
    be answered."""
    small = TINY_MODELS.get(Path(model).name)
    return {} if small is None else small.tasks()


def held_out(task: Task, seed: str, count: int) -> list[list[Message]]:
    """Conversations of a task that no training run has seen, with their answers."""
    return list(islice(conversations({"": (task, 1.0)}, Random(seed), evaluation=True), count))


def held_out_of_each(model: LoadedModel, seed: str, count: int) -> Iterator[tuple[str, list[Message]]]:
    """`count` such conversations of every task that a small model of this kind was taught, with the task's name."""
    taught = TINY_MOE if model.config.vision is None else TINY_VL
    for name, task in taught.tasks().items():
        for messages in held_out(task, f"{seed} {name}", count):
            yield name, messages


def is_right(given: str, wanted: str) -> bool:
    """Whether an answer is the wanted one word for word."""
    return given.split() == wanted.split()


def right_answers(model: LoadedModel, task: Task, seed: str, count: int) -> Sample:
    """How many of the last answers of `count` held-out conversations are the wanted ones word for word."""
    asked = held_out(task, seed, count)
    given = answers(model, asked)
    right = [is_right(text, messages[-1]["content"]) for text, messages in zip(given, asked, strict=True)]
    return {"right": sum(right), "count": len(right), "given": given}


def answers(model: LoadedModel, asked: Sequence[list[Message]]) -> list[str]:
    """Greedy answers to the last questions of conversations, up to eight computed together."""
    batch = model.batch(BatchLimits(rows=ROWS, slots=ROWS, reuse=False))
    waiting = deque(enumerate(asked))
    texts, numbers = [""] * len(asked), dict[Generation, int]()
    while waiting or batch.running:
        while waiting and not batch.full:
            number, messages = waiting.popleft()
            longest = len(model.tokenizer.encode_text(messages[-1]["content"])) + SPARE
            numbers[batch.join(model.request(model.prompt(messages[:-1]), max_tokens=longest))] = number
        for generation, item in batch.step():
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Step):
                texts[numbers[generation]] += item.text
    return texts


def kind_of(task: str) -> str:
    """Whether a task is about pictures."""
    return PICTURES if task.startswith("picture") and task != "picture: missing" else TEXTS


def share_right(samples: Sequence[Sample], kind: str) -> float | None:
    """Right answers of all tasks of a kind, as a share; None if nothing of it was asked. The `part` of a sample's cell
    is its task; samples that are not of answers are passed over."""
    told = [sample for sample in samples if "right" in sample and kind_of(sample["cell"]["part"]) == kind]
    return sum(s["right"] for s in told) / sum(s["count"] for s in told) if told else None


def task_table(model: str, columns: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Right answers by task, a column for each of the conditions whose samples are given."""
    lines = [f"| right answers of {model} | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    for task in tasks_of(model):
        told = [sample for samples in columns.values() for sample in samples if sample["cell"]["part"] == task]
        shares = [f"{sample['right']} of {sample['count']}" for sample in told]
        lines.append(f"| {task} | {' | '.join(shares)} |")
    return lines
