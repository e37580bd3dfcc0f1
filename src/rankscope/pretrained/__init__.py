"""Models to measure: a hub id, a folder, a GGUF file, a PEFT adapter, the built-in one, or a module in memory."""

from rankscope.pretrained.checkpoint import minilm_folder
from rankscope.pretrained.loading import Pretrained, fingerprint, fresh, load, max_positions, resolve_device

__all__ = ["Pretrained", "fingerprint", "fresh", "load", "max_positions", "minilm_folder", "resolve_device"]
