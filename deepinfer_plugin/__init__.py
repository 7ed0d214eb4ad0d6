"""DeepSeek-V4.1-Flash for vLLM. The two entry points of the plugin; importing this module loads neither torch nor vLLM.

vLLM only logs what goes wrong while a plugin is imported, so every check happens inside the functions.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point ``vllm.general_plugins``: add our model to vLLM. vLLM calls it once in each of its processes.

    Raises:
        SettingError: a DEEPINFER_* variable has a value outside its rule.
        PlatformError: this machine or this vLLM cannot run the plugin.
    """
    from deepinfer_plugin.registration import register_all

    register_all()


def platform() -> str | None:
    """Entry point ``vllm.platform_plugins``: the path of our platform class, None where another owns the host."""
    from deepinfer_plugin.platforms.detect import platform_class

    return platform_class()
