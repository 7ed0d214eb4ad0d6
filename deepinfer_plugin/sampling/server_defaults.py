"""What the variables of F17-F19 add to every request of our model. Importing it loads neither torch nor vLLM.

* ``DEEPINFER_SAMPLER_FORCE_TOPK`` holds for a request without ``force_top_k``; that with the whole vocabulary lifts it.
* ``DEEPINFER_DECODE_TOKEN_BLACKLIST`` is never produced: a request can ban more tokens and free none.
* ``DEEPINFER_COMPUTE_SUM_SMALLER_PROBS`` holds for a request without ``sum_smaller_probs`` whose answer can carry the
  sums; a stream of the server and a request for several samples come without, instead of being refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.sampling.extras import Extras
from deepinfer_plugin.sampling.sums import has_carrier
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.variables import COMPUTE_SUM_SMALLER_PROBS, DECODE_TOKEN_BLACKLIST, SAMPLER_FORCE_TOPK

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def server_defaults(settings: Settings, params: SamplingParams) -> Extras:
    """The part of the variables that this request can be given.

    Args:
        settings: those of the process.
        params: of the request; decides only whether its answer can carry sums.
    """
    return Extras(
        force_top_k=settings[SAMPLER_FORCE_TOPK] or None,
        token_blacklist=settings[DECODE_TOKEN_BLACKLIST],
        sum_smaller_probs=settings[COMPUTE_SUM_SMALLER_PROBS] and params.n == 1 and has_carrier(params),
    )


def check_server_defaults(settings: Settings, vocab_size: int) -> None:
    """Refuse values that the model's vocabulary does not have.

    Raises:
        SettingError: a token or a count beyond it, or no token left; the text names the variable.
    """
    environment, banned = settings.environment, settings[DECODE_TOKEN_BLACKLIST]
    if settings[SAMPLER_FORCE_TOPK] > vocab_size:
        raise SettingError(
            f"sampling: {environment.describe(SAMPLER_FORCE_TOPK)}, expected 0 to {vocab_size}, the size of the "
            "vocabulary; correct it or unset it"
        )
    if any(last >= vocab_size for _, last in banned):
        raise SettingError(
            f"sampling: {environment.describe(DECODE_TOKEN_BLACKLIST)}, expected ids from 0 to {vocab_size - 1}; "
            "correct it or unset it"
        )
    if len({token for first, last in banned for token in range(first, last + 1)}) == vocab_size:
        raise SettingError(
            f"sampling: {environment.describe(DECODE_TOKEN_BLACKLIST)}, the whole vocabulary, expected at least one "
            "token outside; correct it or unset it"
        )
