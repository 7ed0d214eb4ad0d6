"""How the user wants experts balanced: vLLM's flags ``--enable-eplb`` and ``--eplb-config``, and our variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_plugin import variables
from deepinfer_plugin.eplb.policy import round_up_extra
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEPT_KEY = "deepinfer_eplb"


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbOptions:
    """Balancing that is on.

    Attributes:
        policy: key of ``policy.POLICIES``.
        window_size: last steps whose counts a policy sees.
        step_interval: steps from one move to the next; the first comes after a quarter of it.
        num_extra_experts: replicas that the user wants at least.
        counts_prefill: whether steps with prompt rows count.
        communicator: vLLM's name of the transport of weights.
        is_async: whether vLLM's own balancer would move in the background; ours moves between two steps.
    """

    policy: str
    window_size: int
    step_interval: int
    num_extra_experts: int
    counts_prefill: bool
    communicator: str
    is_async: bool

    @classmethod
    def of_engine(cls, vllm_config: VllmConfig) -> EplbOptions | None:
        """The options of an engine; None: experts stay where they are."""
        parallel = vllm_config.parallel_config
        if parallel.enable_eplb:
            config: Any = parallel.eplb_config
            given = {name: getattr(config, name) for name in _TAKEN}
        elif (kept := _kept(vllm_config.additional_config)) is not None:
            given = kept
        else:
            return None
        settings = Settings.from_envs()
        return cls(
            policy=settings[variables.EPLB_POLICY],
            window_size=given["window_size"],
            step_interval=given["step_interval"],
            num_extra_experts=given["num_redundant_experts"],
            counts_prefill=settings[variables.EPLB_COUNT_PREFILL],
            communicator=given["communicator"] or "torch_nccl",
            is_async=given["use_async"],
        )

    def extra_experts(self, num_experts: int, num_ranks: int) -> int:
        """Replicas of a layer with ``num_experts`` on ``num_ranks``."""
        return round_up_extra(self.num_extra_experts, num_experts, num_ranks)

    def check(self, num_experts: int, num_ranks: int, *, has_expert_parallel: bool) -> None:
        """Refuse what cannot be balanced.

        Raises:
            ConfigError: names the option.
        """
        if not has_expert_parallel or num_ranks == 1:
            raise ConfigError(
                f"DeepseekV41ForCausalLM: enable_eplb is True with {num_ranks} ranks and "
                f"enable_expert_parallel {has_expert_parallel}, expected two ranks or more that share experts; add "
                "--enable-expert-parallel and --tensor-parallel-size or --data-parallel-size"
            )
        if self.window_size > self.step_interval:
            raise ConfigError(
                f"DeepseekV41ForCausalLM: eplb_config.window_size is {self.window_size}, expected at most "
                f"step_interval, {self.step_interval}: counts from before a move say nothing of the placement after it"
            )
        most = num_experts * (num_ranks - 1)
        if self.extra_experts(num_experts, num_ranks) > most:
            raise ConfigError(
                f"DeepseekV41ForCausalLM: eplb_config.num_redundant_experts is {self.num_extra_experts}, expected at "
                f"most {most}: with more, a rank would hold an expert twice from the start"
            )


_TAKEN = ("window_size", "step_interval", "num_redundant_experts", "communicator", "use_async")


def keep_where_vllm_has_no_balancer(args: Any) -> None:
    """Without an accelerator vLLM refuses ``--enable-eplb``: take the flags out of its sight, for our own balancer.

    Args:
        args: vLLM's ``EngineArgs``; changed in place. Calling it again changes nothing.
    """
    if not args.enable_eplb:
        return
    config = args.eplb_config
    args.additional_config = {**args.additional_config, KEPT_KEY: {name: getattr(config, name) for name in _TAKEN}}
    args.enable_eplb, args.eplb_config = False, type(config)()


def is_kept(args: Any) -> bool:
    """Whether ``keep_where_vllm_has_no_balancer`` has already taken the flags of ``args``."""
    return _kept(getattr(args, "additional_config", None)) is not None


def _kept(additional_config: Any) -> dict[str, Any] | None:
    return additional_config.get(KEPT_KEY) if isinstance(additional_config, dict) else None
