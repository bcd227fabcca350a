"""Cluster: ranks on several machines, over Ray. Only this folder knows Ray; nothing is imported with it by accident."""

from lilo_miles_backend.config import add_to_environment as _add_to_environment

# Read when Ray is imported: else whatever is asked of Ray after the connection was closed starts a cluster here.
_add_to_environment({"RAY_ENABLE_AUTO_CONNECT": "0"})
