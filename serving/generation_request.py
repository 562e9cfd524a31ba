"""The fields that all requests for generated text have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from models import ContextLengthError, KestrelError, LoadedModel, SamplingParams
from models.sampling import MOST_TOP_K
from models.tokenizer import Tokenizer
from serving.errors import bad_request
from serving.json_body import Strict

MOST_CHOICES = 8
LONGEST_ID = 10  # digits of a token id
MOST_BIASED = 2**15  # tokens with a `logit_bias`
SEED_STEP = 0x9E3779B97F4A7C15  # odd and far from small numbers, so that neighbouring seeds share no choices
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1)]


def _few(bias: Any) -> Any:
    """Refuses many before their values are checked, since all that are wrong would be collected."""
    if isinstance(bias, dict) and len(bias) > MOST_BIASED:
        raise ValueError(f"should be for at most {MOST_BIASED} tokens")
    return bias


# Whatever a vocabulary has, this is all of it.
TopK = Annotated[int, Field(ge=0), AfterValidator(lambda count: min(count, MOST_TOP_K))]
Biases = Annotated[dict[str, Bias], Field(max_length=MOST_BIASED), BeforeValidator(_few)]


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class GenerationRequest(Strict):
    """What to generate, and how. None means that the client did not say."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def alternatives(self) -> int:
        """How many of the best tokens are reported with every token."""
        return 0

    def asks(self, option: str) -> bool:
        """Whether the client has set this stream option."""
        return bool(getattr(self.stream_options, option, None))

    def sampling(self, default: SamplingParams) -> SamplingParams:
        """How to sample: what the client says, else the model's own defaults."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        said = {name: getattr(self, name) for name in (*names, *penalties) if getattr(self, name) is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        return SamplingParams(**(vars(default) | said | {"logit_bias": bias, "top_logprobs": self.alternatives}))


def checked_sampling(request: GenerationRequest, model: LoadedModel) -> SamplingParams:
    """How to sample.

    Raises:
        ApiError: 400 for a `logit_bias` for a token that the model does not have.
    """
    sampling = request.sampling(model.default_sampling)
    try:
        model.check_sampling(sampling)
    except KestrelError as error:
        raise bad_request(str(error), "logit_bias") from None
    return sampling


@contextmanager
def prompt_errors(param: str) -> Iterator[None]:
    """Turns what a model has against a prompt into a 400 that names the field in which it came."""
    try:
        yield
    except ContextLengthError as error:
        raise bad_request(str(error), param, "context_length_exceeded") from None
    except KestrelError as error:
        raise bad_request(str(error), param) from None


def check_bias_names(request: GenerationRequest) -> None:
    """Refuses a `logit_bias` for what is no token id."""
    for token in request.logit_bias or ():
        if not token.isascii() or not token.isdecimal() or len(token) > LONGEST_ID:
            raise bad_request(f"'logit_bias' should map token ids to numbers, found {token!r:.40}", "logit_bias")


def check_token_ids(ids: list[int], tokenizer: Tokenizer, param: str) -> None:
    """Refuses ids that the vocabulary does not have."""
    wrong = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if wrong is not None:
        raise bad_request(f"'{param}': token ids lie in 0..{tokenizer.vocab_size - 1}, found {wrong}", param)


def seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """How choice number `index` is sampled: with a seed of its own, which follows from the request's. The first has
    the request's own."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index * SEED_STEP) % 2**64 if index else sampling.seed)
