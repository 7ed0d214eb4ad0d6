"""Counts what the experts compute, step by step, and moves them between ranks.

vLLM's own balancer (``EplbState``) gives a policy the sums over its window, where the summed-peak policy needs every
step; it sets maps that vLLM's fused router reads, which our model does not have; and it needs the events of an
accelerator. So counting and deciding are ours. vLLM's flags, its rule for when to move, its policy, its transfer of
weights and its transports are used as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.distributed.parallel_state import get_ep_group, get_eplb_group
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from deepinfer_kernels import dense_cache
from deepinfer_plugin.eplb import policy
from deepinfer_plugin.metrics import MOE_LB_STEPS, MoeBalance

if TYPE_CHECKING:
    from deepinfer_plugin.eplb.options import EplbOptions
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM
    from deepinfer_plugin.model.parallel import Parallel
    from deepinfer_plugin.model.placement import ExpertLoad

logger = init_logger(f"vllm.{__name__}")


class LoadRecorder:
    """The figure ``moe_lb`` of ranks that share experts: tokens of every rank and layer, step by step."""

    def __init__(self, load: ExpertLoad, parallel: Parallel) -> None:
        self._load, self._parallel = load, parallel
        shape = (MOE_LB_STEPS, load.counts.shape[0], parallel.experts.size)
        self._recent = torch.zeros(shape, dtype=torch.int32, device=load.counts.device)
        self._step = 0
        self.balance = MoeBalance()

    def record(self) -> None:
        """Take the counts of a step; with the last one of an interval all replicas exchange theirs."""
        counts = self._load.counts
        self._recent[self._step] = counts.view(counts.shape[0], self._parallel.experts.size, -1).sum(dim=-1)
        self._step += 1
        if self._step < MOE_LB_STEPS:
            return
        self._step = 0
        for step in sum_over_replicas(self._recent, self._parallel).tolist():
            self.balance.add_step(step)


def sum_over_replicas(counts: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Counts of all replicas, equal on every rank; integers have one sum in any order. Returns them on the host."""
    with gpu_sync_allowed():
        of_replicas = parallel.replicas.gather(counts).cpu()
    return of_replicas.sum(dim=0)


class ExpertMover:
    """Decides every ``step_interval`` steps where the experts of the backbone shall be, and moves their weights."""

    def __init__(self, model: DeepseekV41ForCausalLM, options: EplbOptions) -> None:
        assert model.load is not None, "the model counts where experts are shared"
        self._load, self._parallel, self._options = model.load, model.parallel, options
        self._mixtures = [block.ffn for block in model.blocks()]
        num_layers, num_slots = self._load.counts.shape
        num_experts = model.config.n_routed_experts
        self._num_experts, self._decide = num_experts, policy.POLICIES[options.policy]
        self.placement = policy.first_placement(num_layers, num_experts, num_slots)
        window = (options.window_size, num_layers, num_slots)
        self._window = torch.zeros(window, dtype=torch.int32, device=self._load.counts.device)
        self._weights = [list(mixture.experts.moved()) for mixture in self._mixtures]
        self._buffer = [torch.empty_like(weight) for weight in self._weights[0]]
        is_gpu = self._window.is_cuda
        # Without an accelerator vLLM makes no group of its own for moves; its transport for NCCL knows gloo, too.
        self._transport = create_eplb_communicator(
            get_eplb_group() if is_gpu else get_ep_group(),
            options.communicator if is_gpu else "torch_nccl",
            self._weights,
            self._buffer,
        )
        self._step = options.step_interval - options.step_interval // 4  # the first move comes early, as vLLM's does
        self._recorded = 0
        self.num_moves = 0

    def record(self, *, is_dummy: bool) -> None:
        """Take the counts of a step, and move experts when it is time; every rank calls it after every step.

        Args:
            is_dummy: the step is one of other replicas. All of them use one place of the window for it.
        """
        place = self._window[self._recorded % len(self._window)]
        is_left_out = self._load.has_prompt_rows and not self._options.counts_prefill
        if is_dummy or is_left_out:
            place.zero_()
        else:
            place.copy_(self._load.counts)
        self._recorded += 1
        self._step += 1
        if self._step >= self._options.step_interval:
            self._step = 0
            self.move()
            self._recorded = 0  # what was counted under another placement is old

    def loads(self) -> policy.Loads:
        """[num_layers, num_steps, num_experts] tokens of all replicas in the window."""
        window = self._window[: min(self._recorded, len(self._window))]
        counts = sum_over_replicas(window, self._parallel).numpy()
        loads = np.zeros((counts.shape[1], counts.shape[0], self._num_experts))
        for of_layer, experts, of_slots in zip(loads, self.placement, counts.swapaxes(0, 1), strict=True):
            np.add.at(of_layer.T, experts, of_slots.T)
        return loads

    def move(self) -> None:
        """Let the policy choose, and make it so: weights first, then the maps that send rows to them."""
        loads = self.loads()
        if not loads.any():
            return
        ranks = self._parallel.experts
        wanted = self.placement
        if ranks.rank == 0:  # it decides for all: hosts may differ in the last bit of a sum
            wanted = policy.keep_slots(self._decide(loads, self.placement, ranks.size), self.placement, ranks.size)
        with gpu_sync_allowed():
            agreed = ranks.gather(torch.from_numpy(wanted).to(self._window.device))[0].cpu().numpy()
        num_moved = int((agreed != self.placement).sum())
        if num_moved == 0:
            return
        before, after = (policy.imbalance(loads, one, ranks.size) for one in (self.placement, agreed))
        self.move_weights(agreed)
        for mixture, of_layer in zip(self._mixtures, agreed, strict=True):
            assert mixture.exchange is not None, "experts move between ranks that have whole ones"
            assert mixture.exchange.placement is not None
            mixture.exchange.placement.set(tuple(of_layer.tolist()))
        self.placement = agreed
        self.num_moves += 1
        if ranks.rank != 0:
            return
        logger.info(
            "Experts moved (%s, move %d): %d of %d slots; moe_lb of the last %d steps %.4f, with the new places %.4f",
            self._options.policy,
            self.num_moves,
            num_moved,
            agreed.size,
            loads.shape[1],
            before,
            after,
        )

    def move_weights(self, placement: policy.Placement) -> None:
        """Bring the weights of all layers to a new placement; the present one is in force until all have arrived."""
        group = self._parallel.experts.group
        assert group is not None, "one rank alone moves nothing"
        rearrange_expert_weights_inplace(
            torch.from_numpy(self.placement),
            torch.from_numpy(placement),
            self._weights,
            self._buffer,
            group,
            self._transport,
        )
        dense_cache.clear()  # the references keep what they have made of the weights
