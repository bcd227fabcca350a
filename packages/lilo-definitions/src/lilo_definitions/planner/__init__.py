"""The planner: what a definition costs before anything is rented. Pure arithmetic: no torch, no devices, no network.

    job.py          what is planned: a model, a layout, adapters, lengths
    adapters.py     parameters of adapters, whole and on one rank
    activations.py  what a layer keeps and works with, on GPUs
    autograd.py     the same as the CPU trainer does it, with torch's autograd
    moments.py      the points of a step that can be its peak
    levels.py       what each layer keeps, from the memory that is left
    memory.py       all of it at the moment of the peak, for one rank
    sampler.py      what the embedded sampler takes of a rank's GPU
    flops.py        operations of one token
    traffic.py      bytes between ranks
    rates.py        operations a second, by kind of work
    speed.py        seconds and dollars of a step, at those rates
    plan.py         all together: `make_plan(job)`
    search.py       other layouts: the nearest that fits, the fastest of so many GPUs
    chart.py        a plan as an SVG picture

Formulas with their sources: docs/planner.md.
"""

from lilo_definitions.planner.job import Job, TrainerName
from lilo_definitions.planner.memory import Memory
from lilo_definitions.planner.plan import Plan, levels_of, make_plan, ways_of
from lilo_definitions.planner.sampler import SamplerMemory, beside_sampler, sampler_memory
from lilo_definitions.planner.search import nearest_fit, ranked_layouts

__all__ = [
    "Job",
    "Memory",
    "Plan",
    "SamplerMemory",
    "TrainerName",
    "beside_sampler",
    "levels_of",
    "make_plan",
    "nearest_fit",
    "ranked_layouts",
    "sampler_memory",
    "ways_of",
]
