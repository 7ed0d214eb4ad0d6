"""The platform class vLLM is given when the plugin refuses the machine: making an instance raises the reason."""

from deepinfer_plugin import envs
from deepinfer_plugin.platforms.detect import current_decision


class RefusedPlatform:
    """Never exists: its constructor raises the error that the platform entry point could not raise."""

    def __init__(self) -> None:
        current_decision()
        envs.prepare_interpreter_environment()
