"""A model as researchers and the server use it: load it, ask it for logits, let it generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from models.batch import Batch, BatchLimits
from models.cache import CACHE_TYPES, CacheType
from models.chat_template import ChatTemplate, default_chat_template
from models.checkpoint import Checkpoint, read_json_object
from models.compilation import enable_persistent_cache
from models.config import ModelConfig, parse_config
from models.disk_cache import DiskCache, fingerprint
from models.errors import ConfigError, PromptError
from models.generation import Request, Step, check_room
from models.grammar import Grammar, GrammarCompiler
from models.images import ImageProcessor, VisionInput
from models.inference import Inference, VisualFeatures, plan_chunks
from models.positions import rope_positions
from models.presets import EOS_TOKENS, PRESETS, preset
from models.prompt import Prompt, PromptBuilder
from models.quantisation import Scheme, find_scheme
from models.qwen_vocabulary import QWEN_VOCABULARY, qwen_tokenizer
from models.sampling import SamplingParams, check_bias
from models.switches import Switches
from models.text_stream import NoText, TextStream
from models.tokenizer import Tokenizer
from models.weights import load_network, random_network, stored_scheme

PRETRAINED = Path(__file__).parent / "pretrained"
DEFAULT_CONTEXT = 4096  # tokens of prompt and answer, where neither the caller nor the model sets less


def load(
    path_or_preset: str | Path,
    quant: str | None = None,
    dtype: str = "float32",
    weights: str | None = None,
    *,
    kv: CacheType | None = None,
    mapped: bool = True,
    max_context: int | None = None,
    max_image_tokens: int = 1280,
    switches: Switches | None = None,
) -> LoadedModel:
    """Opens a model: a Hugging Face folder, a model of this repository by name ("tiny-vl"), or a published shape
    ("qwen3-vl-2b") with `weights="random"`.

    `quant` is how matrices are quantised, "q4", "q4-head-q8" or "q8" (`models.quantisation`); None takes them as they
    are stored. Others are kept in `dtype`, "float32" or "bfloat16"; activations are float32. `kv` is the cache's
    type, "float32", "bfloat16" or "int8"; by default int8 with quantised weights, else float32.
    Weights that a folder holds as they are kept are used where its file is mapped: no copy, one for all processes.
    With `mapped=False` they are copied into memory of their own, in huge pages, which is read faster.
    `max_context` limits prompt and answer together, by default to 4096 tokens or what the model was made for;
    `max_image_tokens` limits each picture, and each video with all its frames.

    Raises:
        ConfigError: an argument or `config.json` asks for something that does not exist.
        CheckpointError: the folder does not hold what its configuration promises.
    """
    plan = _plan(path_or_preset, quant, weights, kv=kv, max_context=max_context, max_image_tokens=max_image_tokens)
    enable_persistent_cache()
    switches = switches or Switches()
    folder, config, processor, context, scheme = plan.folder, plan.config, plan.processor, plan.context, plan.scheme
    if plan.checkpoint is None:
        network, identity = random_network(config, dtype, switches, scheme=scheme), "random"
    else:
        network = load_network(plan.checkpoint, config, dtype, switches, scheme, mapped=mapped)
        identity = plan.checkpoint.identity
    kv = kv or ("float32" if scheme is None else "int8")
    return LoadedModel(
        name=Path(path_or_preset).name,
        config=config,
        inference=Inference(network, config, switches, kv),
        weights=f"{identity} {dtype} {scheme and scheme.name}",
        text=_open_text(folder, config, processor, context),
        max_context=context,
        max_image_tokens=0 if processor is None else processor.max_tokens,
        end_tokens=_end_tokens(folder),
        default_sampling=_default_sampling(folder),
    )


def check(
    path_or_preset: str | Path,
    quant: str | None = None,
    weights: str | None = None,
    *,
    kv: CacheType | None = None,
    max_context: int | None = None,
    max_image_tokens: int = 1280,
) -> None:
    """Finds out whether a model can be opened with these arguments of `load`, as far as that takes no weights.

    Raises:
        ConfigError, CheckpointError: as `load`.
    """
    _plan(path_or_preset, quant, weights, kv=kv, max_context=max_context, max_image_tokens=max_image_tokens)


@dataclass(frozen=True)
class _Plan:
    """What is to be loaded. `checkpoint` is None for random weights, `folder` for a preset."""

    folder: Path | None
    config: ModelConfig
    checkpoint: Checkpoint | None
    scheme: Scheme | None
    context: int
    processor: ImageProcessor | None


def _plan(
    path_or_preset: str | Path,
    quant: str | None,
    weights: str | None,
    *,
    kv: CacheType | None,
    max_context: int | None,
    max_image_tokens: int,
) -> _Plan:
    scheme = None if quant is None else find_scheme(quant)
    if kv not in (None, *CACHE_TYPES):
        raise ConfigError(f"kv must be one of {', '.join(CACHE_TYPES)}, found {kv!r}")
    if weights not in (None, "random"):
        raise ConfigError(f"weights must be None (read the folder's) or 'random', found {weights!r}")
    folder = find_folder(path_or_preset)
    config = parse_config(preset(str(path_or_preset)), str(path_or_preset)) if folder is None else read_config(folder)
    if folder is None and weights is None:
        raise ConfigError(
            f"'{path_or_preset}' is a shape without weights: ask for random ones (weights='random', on a command line "
            "--weights random), or name a checkpoint folder"
        )
    context = _context(config, max_context)
    processor = None if config.vision is None else ImageProcessor.from_folder(folder, max_image_tokens)
    checkpoint = None if weights == "random" else Checkpoint.open(folder)
    if checkpoint is not None:
        scheme = _agreed_scheme(checkpoint, scheme)
    return _Plan(folder, config, checkpoint, scheme, context, processor)


def _agreed_scheme(checkpoint: Checkpoint, wanted: Scheme | None) -> Scheme | None:
    """How the weights of a checkpoint will be quantised: as they are stored, else as they are wanted."""
    stored = stored_scheme(checkpoint)
    if stored is not None and wanted not in (None, stored):
        raise ConfigError(f"{checkpoint.folder} holds {stored.name} weights; they cannot become {wanted.name}")
    return stored or wanted


def find_folder(path_or_preset: str | Path) -> Path | None:
    """The checkpoint folder of this name or path; None if it names a preset."""
    for folder in (Path(path_or_preset), PRETRAINED / path_or_preset):
        if folder.is_dir():
            return folder
    if str(path_or_preset) in PRESETS:
        return None
    own = sorted(folder.name for folder in PRETRAINED.glob("*") if folder.is_dir())
    raise ConfigError(
        f"'{path_or_preset}' is neither a folder, nor a model of this repository ({', '.join(own)}), "
        f"nor a preset ({', '.join(PRESETS)})"
    )


def read_config(folder: Path) -> ModelConfig:
    """The configuration in the folder's `config.json`."""
    return parse_config(read_json_object(folder / "config.json"), str(folder / "config.json"))


def _context(config: ModelConfig, max_context: int | None) -> int:
    if max_context is None:
        return min(DEFAULT_CONTEXT, config.text.longest_context)
    if not 2 <= max_context <= config.text.longest_context:
        raise ConfigError(f"max_context must lie in 2..{config.text.longest_context}, found {max_context}")
    return max_context


def _default_sampling(folder: Path | None) -> SamplingParams:
    """How `generation_config.json` says the model is best sampled; greedy where it does not ask for sampling."""
    file = None if folder is None else folder / "generation_config.json"
    values = read_json_object(file) if file is not None and file.is_file() else {}
    if not values.get("do_sample"):
        return SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    try:
        return SamplingParams(**({"temperature": 1.0} | {name: values[name] for name in names if name in values}))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _end_tokens(folder: Path | None) -> frozenset[int]:
    """The end-of-turn ids of `generation_config.json`, else of `config.json`, where a vision-language model may keep
    them among the settings of its decoder; Qwen3's own for a bare shape."""
    if folder is None:
        return frozenset(EOS_TOKENS)
    files = (folder / "generation_config.json", folder / "config.json")
    generation, config = (read_json_object(file) if file.is_file() else {} for file in files)
    for values in (generation, config, config.get("text_config")):
        tokens = values.get("eos_token_id") if isinstance(values, dict) else None
        if tokens is not None:
            return frozenset([tokens] if isinstance(tokens, int) else tokens)
    return frozenset()


@dataclass(frozen=True)
class TextSide:
    """What stands between text and token ids."""

    tokenizer: Tokenizer
    prompts: PromptBuilder


def _open_text(
    folder: Path | None, config: ModelConfig, processor: ImageProcessor | None, context: int
) -> TextSide | None:
    """The folder's tokenizer and template; the real Qwen vocabulary where there is none and the sizes fit it; None for
    a model that has only token ids."""
    if folder is not None and (folder / "tokenizer.json").is_file():
        tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
        template.check_special_tokens(tokenizer.added)
    elif config.text.vocab >= QWEN_VOCABULARY:
        tokenizer, template = qwen_tokenizer(), default_chat_template()
    else:
        return None
    prompts = PromptBuilder(tokenizer, template, processor, config, context)
    return TextSide(tokenizer, prompts)


class LoadedModel:
    """A model ready to run. Not for several threads at once: one thread drives it."""

    def __init__(
        self,
        *,
        name: str,
        config: ModelConfig,
        inference: Inference,
        weights: str,
        text: TextSide | None,
        max_context: int,
        max_image_tokens: int,
        end_tokens: frozenset[int],
        default_sampling: SamplingParams,
    ) -> None:
        """`weights` tells the weights, and how they are kept, from others."""
        self.name = name
        self.config = config
        self.max_context = max_context
        self.max_image_tokens = max_image_tokens
        self.end_tokens = end_tokens
        self.default_sampling = default_sampling
        self.inference = inference
        self._weights = weights
        self._text = text

    @property
    def cache_type(self) -> CacheType:
        """How keys and values are kept."""
        return self.inference.cache_type

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary; PromptError for a model without one."""
        return self._text_side().tokenizer

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools; PromptError for a model without text."""
        return self._text_side().prompts.template.takes_tools

    def _text_side(self) -> TextSide:
        if self._text is None:
            raise PromptError(f"{self.name} has no tokenizer: give it token ids instead of text")
        return self._text

    def prompt(self, messages: list[dict[str, Any]], /, **template_kwargs: Any) -> Prompt:
        """The token ids and pictures of a conversation, through the model's chat template; see `PromptBuilder.build`.

        Raises:
            PromptError: the template refuses the conversation, or it does not fit the context.
            MediaError: a picture cannot be used.
        """
        prompt = self._text_side().prompts.build(messages, **template_kwargs)
        check_room(len(prompt.token_ids), self.max_context)
        return prompt

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises ConfigError if `logit_bias` names a token that the model does not have."""
        check_bias(sampling.logit_bias, self.config.text.vocab)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self.config.text.vocab, self.end_tokens)

    def compile_grammar(self, grammar: str) -> Grammar:
        """A grammar (`models.grammar`) for answers of this model. Unlike generating, any thread may do it, once the
        model is warmed up.

        Raises:
            GrammarError: no answer can be held to it.
        """
        return self._grammars.compile(grammar)

    def logits(
        self,
        token_ids: Sequence[int] | np.ndarray,
        pixel_values: np.ndarray | None = None,
        image_grid_thw: np.ndarray | None = None,
        pixel_values_videos: np.ndarray | None = None,
        video_grid_thw: np.ndarray | None = None,
    ) -> np.ndarray:
        """Float32 logits `[length, vocab]` after every token of `token_ids` `[length]`.

        Pictures come as Hugging Face processors give them: patches `[patches, values]` of all images, and of all
        videos, one after the other, with their grids `[count, 3]` (t, h, w).
        """
        ids = self._checked_ids(token_ids)
        visuals = self._in_order(ids, pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        inference = self.inference
        positions, _ = rope_positions(ids, (visual.grid for visual in visuals), self.config, inference.switches)
        features = [inference.encode(visual.patches, visual.grid) for visual in visuals]
        joined = VisualFeatures.join(features) if features else None
        layers = inference.new_cache(1, self.max_context)
        rows = []
        for chunk in plan_chunks(len(ids)):
            logits, layers = inference.score(layers, inference.chunk_input(0, chunk, ids, positions, joined))
            rows.append(logits)
        return np.concatenate(rows)

    def _checked_ids(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(token_ids)
        if ids.size == 0:  # an empty list has no type of its own
            ids = np.zeros(0, np.int32)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise PromptError(f"token ids must be one row of integers, found shape {ids.shape} of {ids.dtype}")
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.config.text.vocab):
            raise PromptError(f"token ids must lie in 0..{self.config.text.vocab - 1}, found {ids.min()}..{ids.max()}")
        check_room(len(ids), self.max_context)
        return ids.astype(np.int32)

    def _in_order(
        self,
        ids: np.ndarray,
        pixel_values: np.ndarray | None,
        image_grid_thw: np.ndarray | None,
        pixel_values_videos: np.ndarray | None,
        video_grid_thw: np.ndarray | None,
    ) -> list[VisionInput]:
        """Images and videos, merged into the order in which their placeholders appear."""
        images = _split_visuals(pixel_values, image_grid_thw, "image")
        videos = _split_visuals(pixel_values_videos, video_grid_thw, "video")
        if self.config.vision is None:
            if images or videos:
                raise PromptError(f"{self.name} is a text model and takes no pictures")
            return []
        first = {token: np.flatnonzero(ids == token) for token in (self.config.image_token, self.config.video_token)}
        places = []
        for token, visuals in ((self.config.image_token, images), (self.config.video_token, videos)):
            used = 0
            for visual in visuals:
                if used >= len(first[token]):
                    raise PromptError("the prompt has fewer placeholder tokens than its pictures have visual tokens")
                places.append((first[token][used], visual))
                used += visual.tokens(self.config.vision.merge)
        return [visual for _, visual in sorted(places, key=lambda place: place[0])]

    def generate(
        self,
        prompt: str | list[dict[str, Any]] | Sequence[int] | np.ndarray | Prompt,
        *,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        sampling: SamplingParams | None = None,
        images: Sequence[Image.Image] = (),
        grammar: Grammar | None = None,
        ignore_eos: bool = False,
        **visuals: np.ndarray,
    ) -> Iterator[Step]:
        """Yields each generated token with its text, log-probability and margin.

        `prompt` is a question (with `images`, one user turn), a conversation, or token ids; ids may come with the
        picture arguments of `logits`. The answer follows `grammar`, which `compile_grammar` makes. `ignore_eos` goes on
        past end-of-turn tokens, for measurements.

        Raises:
            KestrelError: the prompt, a picture or a value of `sampling` that the model cannot take.
            TypeError: an argument of another type.
        """
        pictures = _listed(images)
        if not isinstance(sampling, SamplingParams | None):
            raise TypeError(f"sampling should be models.SamplingParams(...), found {type(sampling).__name__}")
        if isinstance(prompt, str):
            parts = [{"type": "image", "image": picture} for picture in pictures]
            prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        if isinstance(prompt, Prompt):
            built = prompt
        elif len(prompt) and isinstance(prompt[0], dict):
            built = self.prompt(prompt)
        else:
            ids = self._checked_ids(prompt)
            arguments = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
            built = Prompt(ids, tuple(self._in_order(ids, *(visuals.pop(name, None) for name in arguments))))
        if visuals:
            raise TypeError(f"generate() got unexpected arguments: {', '.join(visuals)}")
        request = self.request(
            built, max_tokens=max_tokens, stop=stop, sampling=sampling, grammar=grammar, ignore_eos=ignore_eos
        )
        return self._steps(request)

    def _steps(self, request: Request) -> Iterator[Step]:
        yield from self.batch().answer(request)

    def request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        sampling: SamplingParams | None = None,
        grammar: Grammar | None = None,
        ignore_eos: bool = False,
        owner: str = "",
    ) -> Request:
        """What a batch needs to answer a prompt; the answer follows `grammar`. The cache of one `owner` is not used for
        another's requests.

        Raises:
            PromptError: the prompt does not fit the context.
            ConfigError: `max_tokens` is not positive.
        """
        check_room(len(prompt.token_ids), self.max_context)
        if max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, found {max_tokens}")
        return Request(
            prompt.token_ids,
            prompt.visuals,
            max_tokens,
            frozenset() if ignore_eos else self.end_tokens,
            sampling or SamplingParams(),
            NoText() if self._text is None else TextStream(self._text.tokenizer, stop),
            grammar,
            owner,
        )

    def batch(self, limits: BatchLimits | None = None) -> Batch:
        """A cache and what runs in it; by default for one request at a time.

        Raises:
            ConfigError: the limits' `disk_folder` cannot be used.
        """
        limits = limits or BatchLimits()
        return Batch(self.inference, self.max_context, limits, self._disk_cache(limits))

    def _disk_cache(self, limits: BatchLimits) -> DiskCache | None:
        if limits.disk_folder is None:
            return None
        inference = self.inference
        return DiskCache(
            limits.disk_folder,
            limits.disk_bytes,
            fingerprint(self.config, inference.switches, inference.cache_type, self._weights, self.max_context),
            inference.block_shapes,
            row_by_row=inference.row_by_row,
            largest_chunk=limits.largest_chunk,
        )

    @property
    def bytes_per_slot(self) -> int:
        """Memory of the cache of one request whose context is full."""
        return self.inference.bytes_per_slot(self.max_context)

    def warm_up(self, limits: BatchLimits | None = None, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every step that a batch of these limits can need; `progress` hears how many of how many are done."""
        if self._text is not None and self.end_tokens:
            _ = self._grammars  # takes a second for a large vocabulary
        limits = limits or BatchLimits()
        self.inference.compile(
            self.max_context,
            self.max_image_tokens,
            limits.decoded_rows,
            limits.slots,
            progress,
            blocks=limits.disk_folder is not None,
        )


def _listed(images: Iterable[Image.Image]) -> list[Image.Image]:
    if not isinstance(images, Image.Image):
        pictures = list(images)
        if all(isinstance(picture, Image.Image) for picture in pictures):
            return pictures
    raise TypeError("images should be a list of PIL pictures, such as [PIL.Image.open(file)]")


def _split_visuals(
    patches: np.ndarray | None, grids: np.ndarray | None, kind: Literal["image", "video"]
) -> list[VisionInput]:
    """Cuts the joined patches of several pictures apart by their grids."""
    if (patches is None) != (grids is None):
        raise PromptError(f"the pixel values of a prompt and the grids of each {kind} must be given together")
    if patches is None:
        return []
    sizes = [tuple(int(side) for side in grid) for grid in np.asarray(grids)]
    counts = [frames * height * width for frames, height, width in sizes]
    if sum(counts) != len(patches):
        raise PromptError(f"the {kind}s have {len(patches)} patches, but their grids add up to {sum(counts)}")
    parts = np.split(np.asarray(patches, np.float32), np.cumsum(counts)[:-1])
    return [VisionInput(part, size, kind) for part, size in zip(parts, sizes, strict=True)]
