"""Ranks: what runs beside a model shard. Only this folder, `checkpoints/` and `sampler/` import torch.

rank.py               one method per command
forward_backward.py   datums -> microbatches -> model -> loss -> gradients of one adapter
model.py, attention.py, weights.py              the frozen base model on megatron-core
lora.py, adapter.py, residents.py               adapters and where they act
rows.py, microbatch.py, losses.py, logprobs.py  numbers of one pass
optimizer.py                                    AdamW of one adapter
device.py, parallel.py, megatron.py             where and with whom this rank runs
"""
