"""Real slow networks on one machine: hosts are network namespaces, links are limited by the kernel.

Linux only, as root or in a space (`space.py`). Benchmarks and tests use `Network`, the command line is `gradsieve lab`.
"""

from gradsieve.lab.network.counters import Counters, interface_counters
from gradsieve.lab.network.errors import NetworkError
from gradsieve.lab.network.link import Link
from gradsieve.lab.network.network import Network
from gradsieve.lab.network.rate import Rate
from gradsieve.lab.network.topology import Topology

__all__ = ["Counters", "Link", "Network", "NetworkError", "Rate", "Topology", "interface_counters"]
