"""Linformer models; importing the package makes the Auto classes of transformers know them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rankscope.models.configuration_linformer import LinformerConfig
from rankscope.models.linformer_encoder import LinformerModel
from rankscope.models.modeling_linformer import (
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
)

__all__ = [
    "LinformerConfig",
    "LinformerForCausalLM",
    "LinformerForMaskedLM",
    "LinformerForQuestionAnswering",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
]

AutoConfig.register(LinformerConfig.model_type, LinformerConfig, exist_ok=True)
for auto, model in (
    (AutoModel, LinformerModel),
    (AutoModelForMaskedLM, LinformerForMaskedLM),
    (AutoModelForCausalLM, LinformerForCausalLM),
    (AutoModelForSequenceClassification, LinformerForSequenceClassification),
    (AutoModelForTokenClassification, LinformerForTokenClassification),
    (AutoModelForQuestionAnswering, LinformerForQuestionAnswering),
):
    auto.register(LinformerConfig, model, exist_ok=True)
