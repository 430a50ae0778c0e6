# SPDX-License-Identifier: Apache-2.0
"""One process per rank, joined by torch.distributed: NCCL where there are GPUs, else gloo."""

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Worker = Callable[[int, int, torch.device], None]


def _start(rank: int, num_ranks: int, port: int, worker: Worker) -> None:
    has_gpus = torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if has_gpus else "gloo", rank=rank, world_size=num_ranks)
    with torch.no_grad():
        worker(rank, num_ranks, device)
    dist.barrier()
    dist.destroy_process_group()


def launch(worker: Worker, num_ranks: int = 2) -> None:
    """Calls worker(rank, num_ranks, device) in each process; fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_start, args=(num_ranks, port, worker), nprocs=num_ranks)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """[num_ranks, ...]: the tensors of all ranks."""
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    dist.all_gather(list(gathered), tensor.contiguous())
    return gathered
