"""The files of a dense Qwen3 model, as trainer and sampler both read them: sizes and tensors. No megatron here."""
