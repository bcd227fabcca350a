"""The sections of the load driver, one module each; `tinker_load.py` runs them."""
