"""The one place that touches transformers' attention interface: capture, fallback, replacement.

Public names of the modules beside it.
"""

from rankscope.attention._call import AttentionCall
from rankscope.attention.capture import CaptureSession, capture
from rankscope.attention.replacement import Replacement, replace_attention, restore
from rankscope.attention.route import AttentionModule, Route, find_route, inspect_model, run_captured
from rankscope.attention.self_check import self_check

__all__ = [
    "AttentionCall",
    "AttentionModule",
    "CaptureSession",
    "Replacement",
    "Route",
    "capture",
    "find_route",
    "inspect_model",
    "replace_attention",
    "restore",
    "run_captured",
    "self_check",
]
