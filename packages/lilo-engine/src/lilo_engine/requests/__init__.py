"""1. REQUEST: HTTP in, HTTP out. Bodies become typed operations, results become bodies; nothing here decides.

Routes by noun: `sessions`, `models`, `training`, `checkpoints`, `sampling`, `futures`, `rest`. `front.py` is what
they share; `body.py`, `decode.py` and `encode.py` turn bytes into operations and results into bytes.
"""
