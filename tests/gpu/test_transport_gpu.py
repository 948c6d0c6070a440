"""Adapters from process to process through a GPU's memory (CUDA IPC): whole, and the memory comes back."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from helpers.adapter_senders import fetch_all_on_cuda, random_update

from miles_k3.adapters.transport.local import Offer
from miles_k3.adapters.update import make_update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HAND_OVERS = 5


def test_an_adapter_crosses_processes_on_the_device_and_leaves_no_memory() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=fetch_all_on_cuda, args=(theirs,), daemon=True)
    process.start()
    host = random_update(0, num_bytes=4 << 20)
    held = []
    for version in range(HAND_OVERS):
        update = make_update(version, host.config, {name: t.cuda() for name, t in host.tensors.items()})
        with Offer(update, to="engine 0", bucket_bytes=1 << 20, timeout_s=60) as offer:
            ours.send(offer.address)
            offer.serve()
        (found, hash_, borrowed), devices = ours.recv()
        assert (found, hash_, borrowed, devices) == (version, update.sha256, [], {"cuda"})
        held.append(torch.cuda.memory_allocated())
    # The other side lets a bucket go when it likes, so one may be still, or no longer, there: none is left behind.
    assert max(held[1:]) <= held[0], f"allocated after each hand-over: {held}"
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
