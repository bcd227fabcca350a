"""Topology: how many ranks a trainer has, which devices they run on, and how they split the model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lilo_definitions.gpus import GpuName
from lilo_definitions.part import Part, misfit


class Topology(Part):
    """How many ranks, and how they split the model. World size is tp x cp x dp."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu talks over gloo, cuda over NCCL."""
    gpu: GpuName | None = None
    """Which GPU is rented and planned for; None: whatever the machine has. Memory and price depend on it."""
    nodes: int = Field(default=1, gt=0)
    """Machines that the ranks are spread over; more than one when a step does not fit the GPUs of one."""
    gpus_per_node: int = Field(default=0, ge=0)
    """0 on CPU; on CUDA one rank runs on each."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks: each holds a part of every weight matrix. Divides weights; costs communication in every
    layer, so it stays inside a node."""
    cp: int = Field(default=1, gt=0)
    """Context-parallel ranks: each holds a part of every row. Divides activations; what long contexts need."""
    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks: each holds different rows. Divides time, not memory."""
    rdma: bool = False
    """Whether nodes reach each other's memory directly; gathering keys and values across nodes needs its speed."""
    align_sequences_to_parallel_layout: Literal["auto", "on", "off"] = "auto"
    """auto pads rows to what the layout needs, on always to 2 x cp x tp (for equal comparison with trainers that do),
    off refuses a row that is not a multiple. Outputs are trimmed back exactly."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp

    @model_validator(mode="after")
    def _devices_for_all_ranks(self) -> Self:
        layout = f"tp {self.tp} x cp {self.cp} x dp {self.dp} = {self.world_size} ranks"
        if self.device == "cpu" and self.gpus_per_node:
            raise misfit(
                "gpus_per_node",
                f"device cpu with gpus_per_node {self.gpus_per_node}; set it to 0, or device to cuda",
            )
        num_gpus = self.nodes * self.gpus_per_node
        if self.device == "cuda" and self.world_size != num_gpus:
            raise misfit(
                "gpus_per_node",
                f"{layout}, but {self.nodes} nodes x {self.gpus_per_node} GPUs = {num_gpus}; "
                "one rank runs on each GPU, so the two must be equal",
            )
        if self.world_size % self.nodes:
            raise misfit(
                "nodes",
                f"{layout} cannot be spread evenly over {self.nodes} nodes; choose a multiple",
            )
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        if self.device == "cpu" and self.gpu is not None:
            raise misfit(
                "gpu", f"device cpu with gpu {self.gpu}; leave gpu out, or set device to cuda"
            )
        if self.rdma and self.nodes == 1:
            raise misfit("rdma", "rdma is true with nodes 1; leave it out, it acts between nodes")
        if self.device == "cuda" and self.nodes > 1 and self.gpus_per_node % self.tp:
            raise misfit(
                "tp",
                f"tp {self.tp} does not divide gpus_per_node {self.gpus_per_node}; "
                "tensor-parallel ranks stay inside a node",
            )
        return self
