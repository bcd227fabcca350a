"""Deploy: a definition on rented machines.

    definition -> trainer_plan.py, sampler_plan.py -> deployment.py (what would be created: pure data) -> modal.py (objects)
    in a container: bodies.py -> ../cluster/ (several nodes) -> head.py (front, engine, trainer) -> resume.py, snapshots.py

Nothing here imports the provider's client before it is needed.
"""

from lilo_engine.deploy.deployment import Deployment, plan
from lilo_engine.deploy.function_plan import FunctionPlan, ImagePlan, Mount, Own
from lilo_engine.deploy.prices import Cost

__all__ = ["Cost", "Deployment", "FunctionPlan", "ImagePlan", "Mount", "Own", "plan"]
