"""Cluster: ranks on several machines, over Ray. Only this folder knows Ray; nothing is imported with it by accident."""
