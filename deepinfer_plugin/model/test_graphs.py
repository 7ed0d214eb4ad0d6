"""The graph mode follows the device and the user, and modes that cannot hold are refused."""

import pytest
from vllm.config.compilation import CUDAGraphMode

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.model.graphs import graph_mode


def test_decode_replays_full_graphs_where_the_user_says_nothing() -> None:
    assert graph_mode(None, has_graphs=True) is CUDAGraphMode.FULL_DECODE_ONLY


@pytest.mark.parametrize("requested", [None, *CUDAGraphMode])
def test_without_graphs_every_wish_gives_none(requested: CUDAGraphMode | None) -> None:
    assert graph_mode(requested, has_graphs=False) is CUDAGraphMode.NONE


@pytest.mark.parametrize("requested", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY])
def test_a_wish_that_holds_is_kept(requested: CUDAGraphMode) -> None:
    assert graph_mode(requested, has_graphs=True) is requested


@pytest.mark.parametrize("requested", [mode for mode in CUDAGraphMode if mode.has_piecewise_cudagraphs()])
def test_pieces_of_prefill_are_refused(requested: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=f"cudagraph_mode is {requested.name}, expected NONE or FULL_DECODE_ONLY"):
        graph_mode(requested, has_graphs=True)


def test_one_graph_for_mixed_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="cudagraph_mode is FULL,"):
        graph_mode(CUDAGraphMode.FULL, has_graphs=True)
