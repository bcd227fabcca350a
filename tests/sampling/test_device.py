"""Where a sampler computes."""

from __future__ import annotations

import pytest
import torch
from lilo_definitions import get
from lilo_engine.errors import InvalidRequest
from lilo_engine.sampling.engine import SamplerConfig
from lilo_miles_backend.sampler import EmbeddedSampler


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_definition_for_gpus_without_one_is_refused_before_anything_is_read():
    definition = get("tiny").derive(
        name="elsewhere", topology={"device": "cuda", "gpu": "H200", "gpus_per_node": 1}
    )
    with pytest.raises(InvalidRequest, match=r"topology.device is cuda.*definition for cpu"):
        EmbeddedSampler(SamplerConfig(definition=definition))
