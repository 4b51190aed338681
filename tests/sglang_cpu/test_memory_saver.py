"""The CPU's memory saver: whose memory it frees."""

import psutil
import pytest
import torch

from megarl.sglang_cpu.memory_saver import CpuMemorySaver

MIB = 1 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_it_frees_what_its_region_allocated_and_nothing_else():
    saver, outside = CpuMemorySaver(), torch.ones(MIB)
    with saver.region("weights"):
        layer = torch.nn.Linear(4096, 2048)  # 32 MiB
        derived = layer.weight.detach().t().contiguous()
        temporary = torch.ones(MIB)
        outside.mul_(2)
        view = outside.view(1024, -1)
    del temporary
    with saver.region("kv_cache"):
        cache = torch.ones(4096, 1024)
    layer.weight.detach().numpy()  # torch would refuse to resize a storage that numpy has seen
    before, address = resident(), layer.weight.data_ptr()
    saver.pause("weights")
    assert before - resident() > 60 * MIB
    saver.resume("weights")
    assert layer.weight.data_ptr() == address
    inner = derived.flatten()[2048:-2048]  # without the pages at the ends
    assert torch.equal(inner, torch.zeros_like(inner))
    assert outside.min() == view.min() == 2 and cache.min() == 1
    with torch.no_grad():
        layer.weight.fill_(3)
    assert layer(torch.ones(1, 4096)).min() > 3 * 4095


def test_regions_are_paused_once():
    saver = CpuMemorySaver()
    with saver.region("kv_cache"):
        torch.ones(8)
    saver.pause("kv_cache")
    with pytest.raises(AssertionError):
        saver.pause("kv_cache")
    saver.resume("kv_cache")
    with pytest.raises(KeyError):
        saver.resume("kv_cache")


def test_a_backup_is_refused():
    with (
        pytest.raises(NotImplementedError, match="come back by a sync"),
        CpuMemorySaver().region("weights", enable_cpu_backup=True),
    ):
        pass
