"""Ranks: what runs beside a model shard. Only this folder, `checkpoints/`, `sampler/` and `bench/` import torch.

rank.py               one method per command
batch.py              a batch's items as passes, and their outputs over all ranks
forward_backward.py   rows -> microbatches -> model -> loss -> gradients of the adapters
rows.py, microbatch.py, alignment.py, stream.py     how rows lie, are padded, packed and shared out
model.py, build.py, weights.py, write_weights.py    this rank's part of the frozen base model on megatron-core
layers/, attention.py, rotary.py, levels.py         a layer as one autograd node, what mixes its tokens, what it keeps
kernels/                                            what differs by device
sites.py, lora.py, adapter.py, residents.py         adapters, where they act, and which part of them is here
losses.py, logprobs.py                              formulas, and logprobs without all logits
reduction.py, optimizer.py                          gradients and norm over all ranks; AdamW of one adapter
captures.py, gather.py, storage.py                  an adapter's way to the checkpoint volume and back
device.py, place.py, parallel.py, collectives.py, megatron.py   where and with whom this rank runs
"""
