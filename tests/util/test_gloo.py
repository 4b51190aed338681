"""Gloo groups of a process share a device: one thread and one listening socket for each process."""

import os

from megarl.util.gloo import make_group


def _threads() -> int:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return names.count("gloo_tcp_loop")


def _groups(rank: int, world: int, store: str) -> tuple[int, int, bool]:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group(list(range(world))) for _ in range(5)]
    direct = make_group(dist.FileStore(store, world), rank, world)
    totals = [torch.tensor([float(rank)]) for _ in groups]
    works = [
        dist.all_reduce(total, group=group, async_op=True)
        for total, group in zip(totals, groups, strict=True)
    ]
    own = torch.tensor([float(rank)])
    direct.allreduce([own]).wait()
    for work in works:
        work.wait()
    summed = {total.item() for total in (*totals, own)}
    backend = groups[0]._get_backend(torch.device("cpu"))
    return _threads(), len(summed), isinstance(backend, dist.ProcessGroupGloo)


def test_groups_of_a_rank_share_a_thread(ranks, tmp_path):
    for threads, sums, known in ranks.run(_groups, str(tmp_path / "store"), world=2):
        assert (threads, sums, known) == (1, 1, True)
