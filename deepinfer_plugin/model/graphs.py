"""Which CUDA graphs a served model uses, and why prefill has none.

Decode, and verification of drafts, replay one full graph per number of rows: every request has the same number of rows,
the caches' metadata hold references to the runner's buffers only, and what follows from the buffers is computed inside
the graph. A query length above 1 changes nothing in that: rows find their request by ``query_start_loc``.

Prefill runs without graphs. vLLM offers two forms for a step whose requests differ in length, and neither can hold:

* Pieces (``PIECEWISE``; "breakable" graphs for a model that torch.compile does not see, broken at attention). vLLM
  keeps one set of pieces per number of padded rows and replays it whatever else the model is called with. A prompt's
  rows need not all pass all layers: bounded replay chooses on the host which rows of a step enter the decoder, and
  which encoder rows are computed again before it. Two steps of one length then have pieces of other shapes, and a
  replay would compute the rows of the step it was captured on. It would need a key made of every row count of a step.
* One full graph for mixed steps (``FULL``). The width of the index scores is the longest context of the step, a number
  the host knows; inside a graph it is ``max_model_len``. At a context of 2^20 that is 4 MiB of fp32 scores a row and
  index source, written and searched whatever the context is. Decode pays that only for its few rows.

What is lost is time between launches: a step of some hundred rows or more hides it behind the kernels.
"""

from vllm.config.compilation import CUDAGraphMode

from deepinfer_plugin.errors import ConfigError

_HELD = (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)


def graph_mode(requested: CUDAGraphMode | None, *, has_graphs: bool) -> CUDAGraphMode:
    """The mode to serve with.

    Args:
        requested: what the user asked for; None: nothing.
        has_graphs: whether the device has graphs and eager execution is not enforced.

    Raises:
        ConfigError: the user asked for graphs of prefill steps.
    """
    if not has_graphs:
        return CUDAGraphMode.NONE
    if requested is None:
        return CUDAGraphMode.FULL_DECODE_ONLY
    if requested not in _HELD:
        raise ConfigError(
            f"DeepseekV41ForCausalLM: cudagraph_mode is {requested.name}, expected "
            f"{' or '.join(mode.name for mode in _HELD)}; the rows of a prefill step do not all pass all layers, so no "
            "captured piece fits another step; leave the option out"
        )
    return requested
