"""The engine on Triton kernels in Triton's interpreter, in a process of its own: it is chosen when kernels load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.engines import make_engine
from helpers.interpreted import interpreted

from miles_k3.errors import EngineError
from miles_k3.rollout.embedded.fused.graphs.decode import decode_fields
from miles_k3.rollout.embedded.fused.graphs.inputs import StaticInputs, tiers_of
from miles_k3.rollout.embedded.fused.graphs.verify import Shape, verify_fields


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_and_recorded_steps_equal_the_plain_engine() -> None:
    """The bare base, one adapter, and two versions beside the base; chunks beside decodes; NaN in all free memory.

    fp32: 1e-4 is what sums in another order come to after five layers.
    """
    found = interpreted("helpers.fused_engines")
    for name, differences in found.items():
        assert differences["tokens"] == differences["routes"] == 0, (name, found)
        assert differences["logprobs"] < 1e-4, (name, found)
    assert found["recorded"]["graphs"] >= 3  # the base, one slot, two slots


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recorded_speculation_is_that_of_launched_kernels() -> None:
    """Tiers and rows of padding, requests that come and go, the base beside a version, drafting in the replay, under
    the guard for what no graph holds. What requests hold: products of a tier's rows sum in another order."""
    found = interpreted("helpers.fused_graphs")
    for name in ("launched", "recorded"):
        assert found[name]["tokens"] == found[name]["routes"] == 0, found
        assert found[name]["logprobs"] < 1e-4, found
    assert found["held"] < 1e-4, found
    assert found["wrong states"] == 0, found
    assert not found["counts differ"], found
    assert found["accepted"] > 5, found
    assert found["graphs"] > 2, found


def test_a_batch_is_padded_with_rows_that_touch_nothing() -> None:
    inputs = StaticInputs(decode_fields(4, 3), torch.device("cpu"))
    table = np.array([[5, 6], [7, 0]])
    for _ in range(3):  # both host buffers, and one that was full before
        inputs.fill({"tokens": np.arange(4), "states": np.array([1, 2, 3, 4]), "table": np.full((4, 3), 9)})
        inputs.fill(
            {"tokens": np.array([8, 9]), "states": np.array([3, 2]), "slots": np.array([0, -1]), "table": table}
        )
        at = {name: view.tolist() for name, view in inputs.on_device.items()}
        assert at["tokens"] == [8, 9, 0, 0]
        assert at["states"] == [3, 2, -1, -1]
        assert at["slots"] == [0, -1, -1, -1]
        assert at["writes"] == [-1] * 4
        assert at["lengths"] == [0] * 4
        assert at["temperature"] == [1.0] * 4
        assert at["table"] == [[5, 6, 0], [7, 0, 0], [0, 0, 0], [0, 0, 0]]
    with pytest.raises(KeyError, match="tokenz"):
        inputs.fill({"tokenz": np.arange(2)})


def test_padding_rows_of_a_verify_are_one_request_more() -> None:
    inputs = StaticInputs(verify_fields(Shape(requests=2, rows=4, pages=0), 3, 2, padding_page=9), torch.device("cpu"))
    for _ in range(2):
        inputs.fill({})
        at = {name: view.tolist() for name, view in inputs.on_device.items()}
        assert (at["cu"], at["rows"], at["seen"], at["writes"]) == ([0, 0, 0, 4], [2] * 4, [0] * 4, [-1] * 4)
        assert (at["states"], at["slots"], at["table"]) == ([-1] * 3, [-1] * 3, [[9, 9]] * 3)
        inputs.fill({"cu": np.array([0, 3, 3, 4]), "rows": np.zeros(3), "stops": np.array([[5], [6]])})
        at = {name: view.tolist() for name, view in inputs.on_device.items()}
        assert at["rows"] == [0, 0, 0, 2]
        assert at["stops"] == [[5, *[-1] * 7], [6, *[-1] * 7], [-1] * 8]


@pytest.mark.parametrize("most", [1, 3, 64, 200, 1000])
def test_tiers_waste_little(most: int) -> None:
    tiers = tiers_of(most)
    assert tiers == sorted(set(tiers))
    assert tiers[-1] == most
    for count in range(1, most + 1):
        tier = next(t for t in tiers if t >= count)
        assert tier - count <= max(3, count // 2), (count, tier)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(EngineError, match=r"cuda_graphs can't be had: it needs CUDA and rollout\.kernels: fused"):
        make_engine(cuda_graphs=True)
    with pytest.raises(EngineError, match="it is on cpu, and Triton's kernels run on CUDA"):
        make_engine(kernels="fused")
    assert make_engine().runner.graphs is None
