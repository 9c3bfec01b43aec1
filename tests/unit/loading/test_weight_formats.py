"""Dense formats against numpy's own products, and the refusal of what is quantised."""

from __future__ import annotations

import pytest
import torch

from model.errors import UnsupportedModel
from model.formats import DenseFormat, refuse_quantised


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_weight_is_applied_as_stored(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).to(dtype)
    dense = DenseFormat(weight)
    assert dense.shape == (5, 7)
    assert torch.equal(dense.dequantize(), weight)
    expected = torch.from_numpy(x.double().numpy() @ weight.double().numpy().T)
    assert dense.linear(x).dtype == dtype
    torch.testing.assert_close(dense.linear(x).double(), expected, rtol=2e-2, atol=2e-2)
    assert [name for name, _ in dense.named_parameters()] == ["weight"]


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_checkpoints_are_refused_by_name(nested: bool) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(UnsupportedModel, match="gptq"):
        refuse_quantised({"text_config": config} if nested else config)
    refuse_quantised({"model_type": "mixtral", "text_config": {}, "quantization_config": None})
