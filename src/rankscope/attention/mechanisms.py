"""The whole table: importing this module registers every mechanism.

Example:
    >>> sorted(MECHANISMS)[:3]
    ['exact_naive', 'linformer', 'linformer_causal']
"""

from rankscope.attention import exact, linformer, linformer_causal, local, lsh, nystrom, performer, sparse
from rankscope.attention._contract import MECHANISMS

__all__ = ["MECHANISMS", "exact", "linformer", "linformer_causal", "local", "lsh", "nystrom", "performer", "sparse"]
