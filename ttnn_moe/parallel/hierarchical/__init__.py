"""Hierarchical dispatch and combine: rings inside a node, one partial a node between nodes, sums in one fixed order.

nodes.py has the topology; rings.py and roles.py have the protocol; engine.py runs it; group.py is the front.
"""

from .group import Dispatched, Group, Meta, Sizes
from .nodes import Nodes
from .roles import Shape
from .transport import PeerStopped, Report, Transport
from .tree import tree_sum

__all__ = ["Dispatched", "Group", "Meta", "Nodes", "PeerStopped", "Report", "Shape", "Sizes", "Transport", "tree_sum"]
