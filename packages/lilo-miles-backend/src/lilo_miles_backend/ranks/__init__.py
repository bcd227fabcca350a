"""Ranks: what runs beside a model shard. Only this folder, `checkpoints/`, `sampler/` and `bench/` import torch.

rank.py               one method per command
batch.py              a batch's items as passes, and their outputs over all ranks
forward_backward.py   rows -> microbatches -> model -> loss -> gradients of the adapters
rows.py, filling.py, microbatch.py, stream.py, alignment.py     how rows are shared out, packed and padded
model.py, build.py, weights.py, write_weights.py    this rank's part of the frozen base model on megatron-core
layers/, attention.py, rotary.py, levels.py         a layer as one autograd node, what mixes its tokens, what it keeps
kernels/                                            what differs by device
sites.py, lora.py, adapter.py, residents.py         adapters, where they act, and which part of them is here
losses.py, token_loss.py, logprobs.py               formulas, and the head in one pass without all logits
answers.py, transfer.py, clock.py                   what a batch found, read once; how it comes to the host
report.py, pass_metrics.py, work.py, memory.py      what a pass took: seconds, operations, memory
reduction.py, optimizer.py                          gradients and norm over all ranks; AdamW of one adapter
captures.py, gather.py, storage.py                  an adapter's way to the checkpoint volume and back
device.py, place.py, parallel.py, collectives.py, megatron.py   where and with whom this rank runs
"""
