"""Nodes of several ranks: compressed between nodes, exact or lightly compressed inside one."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from dynamiq.core.compressor import Compressor
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.hierarchy import HierarchicalSchedule
from dynamiq.core.registry import (
    AnyCompressor,
    AnyTopology,
    compressor_registry,
    topology_registry,
)
from dynamiq.core.topology import Hop, Step, Topology
from dynamiq.topologies.ring import Ring


def _floats() -> Compressor:
    return compressor_registry.read({"kind": "uncompressed", "format": "fp32"})


@topology_registry.register
class Hierarchical(Topology):
    """Reduce-scatter inside each node, all-reduce between nodes, all-gather inside each node.

    Rank r is on node r // ranks_per_node, as torchrun numbers ranks. The pipeline's compressor
    encodes what travels between nodes: the slice of each place, over the ranks of that place on all
    nodes. With g ranks per node a rank sends 2 (n - g)/n of d/g entries to other nodes. A mean is
    divided by g inside the node and by the number of nodes between them, each quotient rounded.

    With one node the compressor has nothing to do; with one rank per node this is ``inter``.

    Attributes:
        ranks_per_node: Ranks g of each node; the world size is a multiple.
        intra: Topology inside a node.
        inter: Topology between nodes.
        local: Wire format inside a node; without state. The result comes back in its own dtype,
            exactly. Its contamination unit adds to that of the pipeline's compressor.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    ranks_per_node: int = Field(ge=1)
    intra: AnyTopology = Field(default_factory=Ring)
    inter: AnyTopology = Field(default_factory=Ring)
    local: AnyCompressor = Field(default_factory=_floats)

    @property
    def compresses(self) -> bool:
        """Whether ``local`` is anything but plain floats."""
        return self.local.kind != "uncompressed"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("intra", "inter"):
            if isinstance(getattr(self, name), Hierarchical):
                raise ValueError(f"{name} must be a topology of one level, such as Ring()")
        if self.local.stateful:
            raise ValueError(
                f"local={self.local.kind} carries state from call to call, which is kept for the "
                f'pipeline\'s compressor only; use Uncompressed("bf16"), or one without state'
            )
        return self

    def schedule(self, world_size: int) -> HierarchicalSchedule:
        """Bind to a world size.

        Raises:
            ConfigurationError: It is no multiple of ranks_per_node, or ``local`` cannot sum them.
        """
        if world_size < 1:
            raise ConfigurationError(f"a schedule needs at least one rank, got {world_size}")
        nodes = self._nodes(world_size)
        self.local.check_world_size(self.ranks_per_node)
        return HierarchicalSchedule(
            self,
            world_size,
            intra=self.intra.schedule(self.ranks_per_node),
            inter=self.inter.schedule(nodes),
            local=self.local,
        )

    def hops(self, world_size: int) -> tuple[Hop, ...]:
        """Return the hops between nodes, where ``summed`` counts nodes."""
        return self.inter.hops(self._nodes(world_size))

    def steps(self, world_size: int, rank: int) -> tuple[Step, ...]:
        """Return the rounds of one rank, in order: its node's, its column's, its node's.

        Peers are ranks of the world; messages are numbered within their node or column.
        """
        schedule = self.schedule(world_size)
        members, column = schedule.node(rank), schedule.column(rank)
        near = [
            replace(s, to=members[s.to], source=members[s.source], link="node")
            for s in schedule.intra.steps(members.index(rank))
        ]
        far = [
            replace(s, to=column[s.to], source=column[s.source])
            for s in schedule.inter.steps(column.index(rank))
        ]
        return (*(s for s in near if s.reduce), *far, *(s for s in near if not s.reduce))

    def _nodes(self, world_size: int) -> int:
        nodes, rest = divmod(world_size, self.ranks_per_node)
        if rest:
            raise ConfigurationError(
                f"{world_size} ranks cannot be split into nodes of {self.ranks_per_node}: the last "
                f"node would have {rest}. Start the same number of ranks on every node and give it "
                f"as ranks_per_node (torchrun's --nproc-per-node)"
            )
        return nodes
