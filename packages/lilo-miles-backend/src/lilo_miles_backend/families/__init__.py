"""Families: what the files of a base model hold, as trainer and sampler both read them. No computation, no Megatron.

One file per family turns its `config.json` into a `ModelShape` or refuses it; a new family is a file here, a line in
`read.py`, and whatever its layers need that is not built yet.
"""
