"""The model. vLLM resolves the registered name here; the classes load only when a worker asks for one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM

__all__ = ["DeepseekV41ForCausalLM"]


def __getattr__(name: str) -> Any:
    if name == "DeepseekV41ForCausalLM":
        from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM

        return DeepseekV41ForCausalLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
