"""A step ahead without an accelerator: who asks for it gets it, and nobody else."""

import pytest

from deepinfer_plugin.errors import ConfigError
from deepinfer_plugin.platforms.cpu import ASYNC_SCHEDULING, wants_async_scheduling


@pytest.mark.parametrize("value", [True, False])
def test_it_is_on_where_it_is_asked_for(value: bool) -> None:
    assert wants_async_scheduling({ASYNC_SCHEDULING: value, "other": 1}) is value


@pytest.mark.parametrize("config", [{}, {"other": True}, object()])
def test_it_is_off_where_nobody_asks(config: object) -> None:
    assert not wants_async_scheduling(config)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_another_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"async_scheduling_on_cpu is .*, expected true or false"):
        wants_async_scheduling({ASYNC_SCHEDULING: value})
