"""rankscope measures how low-rank a transformer's attention is, says what that buys, and builds Linformers.

Names below are imported when first used, so that ``import rankscope`` and ``rankscope --help`` stay light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.attention.drop_in import replace_attention as replace_attention
    from rankscope.attention.interface import restore as restore
    from rankscope.models import LinformerConfig as LinformerConfig
    from rankscope.models import LinformerForCausalLM as LinformerForCausalLM
    from rankscope.models import LinformerForMaskedLM as LinformerForMaskedLM
    from rankscope.models import LinformerForQuestionAnswering as LinformerForQuestionAnswering
    from rankscope.models import LinformerForSequenceClassification as LinformerForSequenceClassification
    from rankscope.models import LinformerForTokenClassification as LinformerForTokenClassification
    from rankscope.models import LinformerModel as LinformerModel
    from rankscope.models.in_place import linformerize as linformerize
    from rankscope.models.in_place import load_projections as load_projections
    from rankscope.models.in_place import save_projections as save_projections
    from rankscope.spectrum.dataset import load as load
    from rankscope.spectrum.measure import measure as measure

__version__ = "0.1.0"

_HOMES = {
    "measure": "rankscope.spectrum.measure",
    "load": "rankscope.spectrum.dataset",
    "replace_attention": "rankscope.attention.drop_in",
    "restore": "rankscope.attention.interface",
    "linformerize": "rankscope.models.in_place",
    "save_projections": "rankscope.models.in_place",
    "load_projections": "rankscope.models.in_place",
    "LinformerConfig": "rankscope.models",
    "LinformerForCausalLM": "rankscope.models",
    "LinformerForMaskedLM": "rankscope.models",
    "LinformerForQuestionAnswering": "rankscope.models",
    "LinformerForSequenceClassification": "rankscope.models",
    "LinformerForTokenClassification": "rankscope.models",
    "LinformerModel": "rankscope.models",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rankscope' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
