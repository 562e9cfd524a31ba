"""Errors a user can cause. Each message names the file, field or limit, and what would be right."""


class KestrelError(ValueError):
    """Base of every error that bad input, a bad file or a bad setting can cause."""


class ConfigError(KestrelError):
    """A configuration or an argument that no model here can be built from."""


class CheckpointError(KestrelError):
    """A checkpoint folder that cannot be read, or does not hold what its configuration promises."""


class MediaError(KestrelError):
    """A picture or video that cannot be decoded, or breaks a limit."""


class PromptError(KestrelError):
    """A conversation that cannot be turned into a prompt."""


class ContextLengthError(PromptError):
    """A prompt that leaves no room for an answer in the context."""


class GrammarError(KestrelError):
    """A schema or grammar that no answer can be held to."""


class KernelError(KestrelError):
    """Compiled kernels that cannot be built, loaded or used on this machine."""
