"""Which part of the model a rank holds: sizes, rows, and that the ranks together read every byte once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer_batch_invariant.collectives import Ranks
from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model import shards, weights
from deepinfer_plugin.model.bench_load import make_parameters
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel, check_sizes
from deepinfer_plugin.model.shares import Shares
from deepinfer_plugin.model.tensors import Group, expected_tensors
from deepinfer_plugin.model.weights import iterate_tensors, load_into, parameter_specs
from deepinfer_plugin.reference.released_config import released_config_dict
from deepinfer_plugin.reference.synthetic import write_synthetic

GROUPS: tuple[Group, ...] = ("text",)
GATHERED = ("embed.weight", "layers.2.attn.wq_b.scale", "layers.3.engram.embed.weight", "layers.3.engram.wkv.weight")


def member(rank: int, tensor: int, replicas: int = 1) -> Parallel:
    """One of ``tensor * replicas`` ranks, without a process group: nothing is exchanged here.

    With ``replicas`` 0 one of ``tensor`` ranks that cut every expert.
    """
    experts = Ranks(rank=rank, size=tensor * replicas) if replicas else Ranks()
    return Parallel(tensor=Ranks(rank=rank % tensor, size=tensor), experts=experts)


@pytest.mark.parametrize(
    ("tensor", "experts"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (8, 8), (1, 8), (2, 16), (8, 64)]
)
def test_the_released_model_can_be_cut(tensor: int, experts: int) -> None:
    check_sizes(ModelConfig.from_dict(released_config_dict()), tensor, experts)


@pytest.mark.parametrize(
    ("tensor", "experts", "message"),
    [
        (3, 3, r"tensor_parallel_size is 3, expected one of \[1, 2, 4, 8\]"),
        (16, 16, "tensor_parallel_size is 16, expected one of"),
        (4, 4, "tensor_parallel_size is 4, expected a divisor of o_groups, 2"),
        (1, 3, "the number of ranks that share the experts is 3, expected a divisor of n_routed_experts, 8"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused(
    tensor: int, experts: int, message: str, nano_config: ModelConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sizes(nano_config, tensor, experts)


@pytest.mark.parametrize(("tensor", "replicas"), [(2, 1), (1, 2), (2, 2), (1, 4), (2, 0)])
def test_every_row_has_an_owner_and_expert_rows_have_one(tensor: int, replicas: int, nano_config: ModelConfig) -> None:
    num_ranks = tensor * max(replicas, 1)
    members = [Shares(nano_config, member(rank, tensor, replicas)) for rank in range(num_ranks)]
    for name, spec in expected_tensors(nano_config).items():
        owners = Counter(row for shares in members for row in shares.rows(name, spec) or ())
        assert sorted(owners) == list(range(spec.shape[0])), name
        if ".experts." in name:
            assert set(owners.values()) == {1}, name
        elif re.search(r"attn\.(attn_sink|wq_b|wo_a|wo_b)|^embed|^head|engram\.(embed|wkv)|shared_experts\.w2", name):
            assert set(owners.values()) == {num_ranks // tensor}, name
        else:
            assert set(owners.values()) == {num_ranks}, name


@pytest.mark.parametrize("replicas", [1, 0], ids=["whole experts", "experts cut by outputs"])
@pytest.mark.parametrize("whole", [False, True], ids=["own reader", "whole tensors"])
def test_shares_side_by_side_are_the_tensors_of_the_file(
    whole: bool,
    replicas: int,
    checkpoint: Callable[..., Path],
    nano_config: ModelConfig,
    nano_tensors: dict[str, torch.Tensor],
) -> None:
    folder, held = checkpoint("nano", 0), []
    for rank in range(2):
        parallel = member(rank, 2, replicas)
        model = make_parameters(nano_config, parallel)
        given = nano_tensors.items() if whole else iterate_tensors(folder, nano_config, GROUPS, parallel)
        assert load_into(model, given, nano_config, parallel=parallel) == set(
            parameter_specs(nano_config, parallel=parallel)
        )
        held.append(dict(model.named_parameters()))
    for name in GATHERED:
        want = nano_tensors[name]
        got = torch.cat([parameters[name].view(torch.uint8) for parameters in held])
        assert_bitwise_equal(got, want.view(torch.uint8), label=name)
    for stack, matrices in (("w2", ("w2",)), ("w13", ("w1", "w3"))):
        for part, suffix in (("weight", ""), ("scale", "_scale")):
            stacks = [parameters[f"layers.2.ffn.experts.{stack}{suffix}"].data for parameters in held]
            halves = zip(*(one.chunk(len(matrices), dim=1) for one in stacks), strict=True)
            for matrix, shares in zip(matrices, halves, strict=True):
                names = [f"layers.2.ffn.experts.{expert}.{matrix}.{part}" for expert in range(8)]
                want = torch.stack([nano_tensors[name] for name in names]).view(torch.uint8)
                assert_bitwise_equal(torch.cat(shares, dim=0 if replicas else 1), want, label=names[0])


@pytest.mark.parametrize("replicas", [1, 0], ids=["whole experts", "experts cut by outputs"])
def test_two_ranks_read_every_byte_once_except_what_both_hold(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_synthetic(tmp_path, 200_000_000, 4).config
    reads, readers = Counter[str](), Counter[str]()
    read_rows = shards.read_rows

    def counted(file: object, name: str, stored: shards.StoredTensor, rows: range) -> torch.Tensor:
        tensor = read_rows(file, name, stored, rows)  # type: ignore[arg-type]
        reads[name] += tensor.nbytes
        readers[name] += 1
        return tensor

    monkeypatch.setattr(weights, "read_rows", counted)
    for rank in range(2):
        for _ in iterate_tensors(tmp_path, config, GROUPS, member(rank, 2, replicas)):
            pass
    stored = {name: tensor for name, tensor in shards.stored_tensors(tmp_path).items() if name in reads}
    text = [name for name, spec in expected_tensors(config).items() if spec.group == "text"]
    assert sorted(reads) == sorted(text)
    twice = {name for name, count in reads.items() if count == 2 * stored[name].num_bytes}
    assert all(reads[name] == stored[name].num_bytes for name in reads.keys() - twice)
    replicated = r"norm|\.hc_|ffn\.gate\.|attn\.(wq_a|wkv|compressor|indexer)|shared_experts\.w[13]|engram\.[qk]_weight"
    assert {name for name in reads if re.search(replicated, name)} == twice
    assert {count for name, count in readers.items() if ".experts." in name} == {1 if replicas else 2}


def test_a_width_that_ranks_cannot_share_is_named(nano_config: ModelConfig) -> None:
    odd = replace(nano_config, vocab_size=257)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, expected a divisor of vocab_size, 257"):
        check_sizes(odd, 2, 2)


def test_a_number_of_experts_matters_only_where_whole_ones_are_dealt_out(nano_config: ModelConfig) -> None:
    few = replace(nano_config, n_routed_experts=7, dspark_n_routed_experts=3)
    check_sizes(few, 2, 1, has_drafts=True)
    with pytest.raises(ConfigError, match="share the experts is 2, expected a divisor of n_routed_experts, 7"):
        check_sizes(few, 2, 2)


def test_a_hidden_width_that_ranks_cannot_share_is_named(nano_config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, expected a divisor of hidden_size / 32, 3"):
        check_sizes(replace(nano_config, hidden_size=96), 2, 1)
