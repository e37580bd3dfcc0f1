"""Capture as the measurement uses it: the attention interface's ``capture`` and a head at a time.

The interception itself lives in :mod:`rankscope.attention.interface`, the one place that touches transformers'
attention interface; here its calls become heads without padding.
"""

from rankscope.attention.interface import AttentionCall, capture, run_captured, self_check
from rankscope.spectrum.heads import Head, heads_of

__all__ = ["AttentionCall", "Head", "capture", "heads_of", "run_captured", "self_check"]
