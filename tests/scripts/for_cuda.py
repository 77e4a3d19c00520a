"""A script that was written for CUDA and NCCL; the testbed runs it with --as-cpu."""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

assert torch.cuda.is_available(), "needs a GPU"
dist.init_process_group(backend="nccl", device_id=torch.device("cuda:0"))
rank = dist.get_rank()
torch.cuda.set_device(rank % torch.cuda.device_count())
device = torch.device("cuda", torch.cuda.current_device())
mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
model = DistributedDataParallel(common.model().to(device), device_ids=[0], output_device=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
data = TensorDataset(*common.batch(0, rank))
begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
losses = []
begun.record()
for images, labels in DataLoader(data, batch_size=2, pin_memory=True):
    images, labels = images.cuda(non_blocking=True), labels.pin_memory().to("cuda:0")
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.amp.autocast(enabled=False):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    metric = torch.zeros(1, device="cuda") + loss.detach()
    dist.all_reduce(metric, op=dist.ReduceOp.AVG, group=mesh.get_group())
    losses.append(metric.item())
world, average = dist.get_world_size(), torch.full((2,), float(rank), device="cuda")
dist.all_reduce(average, op=dist.ReduceOp.AVG, async_op=True).wait()
part = torch.empty(1, device="cuda")
dist.reduce_scatter(part, [torch.full((1,), float(rank), device="cuda")] * world, op=dist.ReduceOp.AVG)
total = torch.full((1,), float(rank), device="cuda")
dist.reduce(total, 0, op=dist.ReduceOp.AVG)
assert average.tolist() == [(world - 1) / 2] * 2 and part.item() == (world - 1) / 2
assert rank > 0 or total.item() == (world - 1) / 2
ended.record()
torch.cuda.synchronize()
assert begun.elapsed_time(ended) > 0 and torch.cuda.max_memory_allocated() == 0
dist.barrier(device_ids=[0])
common.report(rank, losses)
dist.destroy_process_group()
