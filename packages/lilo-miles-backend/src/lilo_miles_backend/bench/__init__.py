"""Bench: measures trainer and sampler against Hugging Face + PEFT on the same machine: `lilo bench trainer`, `lilo bench sampler`."""
