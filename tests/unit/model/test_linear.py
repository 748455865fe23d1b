"""A packed matrix multiplies like a plain one."""

from __future__ import annotations

import pytest
import torch

from pdd.model.linear import Linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_changes_speed_only(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    linear = Linear(48, 32, dtype, CPU, bias=bias)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    x = torch.randn(5, 32, dtype=dtype)
    plain = linear(x)
    linear.pack()
    torch.testing.assert_close(linear(x), plain)
    assert (linear.weight.numel() == 0) is (dtype is torch.bfloat16)  # held once


def test_a_weight_that_is_taken_is_held_no_more() -> None:
    linear = Linear(4, 2, torch.float32, CPU)
    assert linear.take().shape == (4, 2)
    assert linear.weight.numel() == 0
