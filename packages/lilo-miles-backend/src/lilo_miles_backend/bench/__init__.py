"""Bench: measures the trainer's arithmetic against Hugging Face + PEFT on the same machine: `lilo bench trainer`."""
