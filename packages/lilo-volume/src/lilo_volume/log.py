"""Log: warnings of this package, through the standard `logging` under the name `lilo_volume`.

Loaded when there is something to say: `logging` would be a tenth of what importing this package may cost.
"""

from __future__ import annotations

import importlib


def warn(message: str, *arguments: object) -> None:
    """Log a warning; `message` has %s places for `arguments`, filled in only if it is shown."""
    logging = importlib.import_module("logging")
    logging.getLogger("lilo_volume").warning(message, *arguments)
