"""Boxes against plain index arithmetic on small tensors."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_k3.trainer.boxes import Box, boxes_of_run, find_overlap

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The flat numbers of a box's elements, row by row."""
    numbers = torch.arange(Box.whole(shape).numel).view(shape)
    return numbers[box.within(Box.whole(shape))].reshape(-1).tolist()


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append(Box(start, tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))))
    return shape, boxes


@given(shapes, st.data())
def test_the_boxes_of_a_run_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = Box.whole(shape).numel
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    boxes = list(boxes_of_run(shape, begin, end))
    assert [i for box in boxes for i in elements(box, shape)] == list(range(begin, end))
    assert all(box.fits(shape) for box in boxes)
    assert len(boxes) <= 2 * len(shape) - 1


@given(box_lists())
def test_overlaps_are_found_as_by_comparing_elements(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    common = {
        (i, j): sorted(set(elements(a, shape)) & set(elements(b, shape)))
        for (i, a), (j, b) in combinations(enumerate(boxes), 2)
    }
    for (i, j), numbers in common.items():
        overlap = boxes[i].overlap(boxes[j])
        assert (elements(overlap, shape) if overlap else []) == numbers
    found = find_overlap(boxes)
    assert (found is not None) == any(common.values())
    if found:
        assert common[found]


def test_a_box_that_leaves_its_tensor_does_not_fit() -> None:
    assert Box((1, 0), (2, 3)).fits((3, 3))
    for box in (Box((2, 0), (2, 3)), Box((0, 0), (3, 4)), Box((0,), (3,)), Box((0, 0), (0, 3)), Box((-1, 0), (1, 1))):
        assert not box.fits((3, 3))


def test_tiles_of_a_large_tensor_are_compared_fast() -> None:
    """As 512 ranks write one tensor: comparing each with each would take seconds for every tensor of the model."""
    rows = [Box((0, row, 0), (1, 1, 64)) for row in range(2048)]
    assert find_overlap(rows) is None
    assert find_overlap([*rows, Box((0, 7, 63), (1, 1, 1))]) == (7, 2048)
