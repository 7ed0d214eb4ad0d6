"""Errors of the plugin: what a user, a file or a machine can get wrong. Each is one sentence that says what to do."""

from deepinfer_kernels.errors import DeepInferError


class ConfigError(DeepInferError):
    """A field of config.json, or a vLLM option, is not one that the plugin can serve."""


class CheckpointError(DeepInferError):
    """A file of the checkpoint is missing, damaged or contradicts another one."""


class SettingError(DeepInferError):
    """A DEEPINFER_* variable or a command-line argument has a value outside its rule."""


class PlatformError(DeepInferError):
    """This machine, or another plugin in it, does not allow what was asked for."""


class InputError(DeepInferError):
    """A line of a user's input file cannot be read; the text starts with ``file:line``."""


class EngineError(DeepInferError):
    """vLLM did not start, or stopped, under one of our programs."""


class PromptError(DeepInferError):
    """A chat request cannot be rendered into a prompt; a server answers it with status 400."""
