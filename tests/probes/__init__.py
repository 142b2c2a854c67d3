"""Wire formats that live in the tests: each needs something of the interfaces that others do not.

They are the smallest formats of their kind, not good ones. What they need:

* :class:`RotatedIntegers`: integers as working buffer, a transform over the whole bucket, sizes
  that depend on how many ranks a message sums;
* :class:`NonZeroBlocks`: sizes that depend on the data of all ranks;
* :class:`FloatPerHop`: sizes that depend on the hop;
* :class:`AdaptiveFixedPoint`: sizes that depend on earlier calls, through shared state.
"""

from tests.probes.adaptive import AdaptiveFixedPoint
from tests.probes.blocks import NonZeroBlocks
from tests.probes.hops import FloatPerHop
from tests.probes.integers import RotatedIntegers

__all__ = ["AdaptiveFixedPoint", "FloatPerHop", "NonZeroBlocks", "RotatedIntegers"]
