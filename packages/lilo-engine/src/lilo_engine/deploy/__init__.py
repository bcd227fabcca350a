"""Deploy: a definition on rented machines.

    definition -> deployment.py (what would be created: pure data) -> modal.py (the provider's objects)
    in a container: bodies.py -> cluster.py, bring_up.py (several nodes) -> head.py (front, engine, trainer) -> records.py

Nothing here imports the provider's client before it is needed.
"""

from lilo_engine.deploy.deployment import Deployment, FunctionPlan, ImagePlan, Mount, Own, plan
from lilo_engine.deploy.prices import Cost

__all__ = ["Cost", "Deployment", "FunctionPlan", "ImagePlan", "Mount", "Own", "plan"]
