"""Cluster: several machines become one Ray cluster, and end as one. Ray is reached by its command line alone.

Used by `deploy/bodies.py` in a provider's containers and by `lilo cluster` (lilo-miles-backend) on machines of one's
own. What runs on the cluster is the trainer's business.
"""
