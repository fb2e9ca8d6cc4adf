"""Where work runs: in this process, in several processes of this machine, or on many machines through Ray.

One protocol, `Cluster.map(function, shards)`: every shard of a crowd is handed to the function, and results come back
in the order of the shards. The function computes with one thread and sees one shard at a time, wherever it runs, so
that results do not depend on the backend or on the number of workers, not even in their last bit.
"""

from onebasin.cluster.opening import Needs, Places, cluster_for, open_cluster, places_in
from onebasin.cluster.protocol import Cluster
from onebasin.cluster.serial import Serial
from onebasin.cluster.travelling import as_arrived, settled, travel_by_value

__all__ = [
    "Cluster",
    "Needs",
    "Places",
    "Serial",
    "as_arrived",
    "cluster_for",
    "open_cluster",
    "places_in",
    "settled",
    "travel_by_value",
]
