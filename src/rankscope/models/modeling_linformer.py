"""Linformer with its heads: masked and causal language modelling, sequences, tokens, spans."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.roberta.modeling_roberta import RobertaClassificationHead, RobertaLMHead
from transformers.utils.generic import can_return_tuple

from rankscope._errors import RankscopeError
from rankscope._masks import padding_from_attention_mask
from rankscope.models.configuration_linformer import LinformerConfig
from rankscope.models.linformer_encoder import LinformerModel, LinformerPreTrainedModel, first_kept

TIED = {
    "lm_head.decoder.weight": "linformer.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """The encoder with RoBERTa's masked-language-model head.

    Args:
        config: Its settings.

    Raises:
        RankscopeError: A decoder's configuration.
    """

    _tied_weights_keys = TIED

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        if config.is_decoder:
            raise RankscopeError("LinformerForMaskedLM needs `is_decoder`=False: a decoder sees no later token")
        self.linformer = LinformerModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The map to the vocabulary."""
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the map to the vocabulary."""
        self.lm_head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits ``(b, n, vocab_size)`` and, with ``labels`` (-100 = none), their mean cross-entropy in nats.

        Args:
            input_ids: As in :meth:`LinformerModel.forward`, like those up to ``inputs_embeds``.
            attention_mask: ``(b, n)``, 1 = keep.
            token_type_ids: ``(b, n)``.
            position_ids: ``(b, n)``.
            inputs_embeds: ``(b, n, d)``.
            labels: ``(b, n)``.
            num_items_in_batch: Labelled tokens the loss is divided by, where Trainer accumulates gradients.
            kwargs: As in :meth:`LinformerModel.forward`.
        """
        outputs = self.linformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForCausalLM(LinformerPreTrainedModel, GenerationMixin):
    """The decoder: causal chunked Linformer, or exact causal attention, with RoBERTa's language-model head.

    Args:
        config: Its settings; ``is_decoder`` is set.

    Example:
        >>> import torch
        >>> config = LinformerConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8, max_position_embeddings=64, projection="mean", is_decoder=True)
        >>> LinformerForCausalLM(config).generate(torch.tensor([[3, 4]]), max_new_tokens=3, min_new_tokens=3).shape
        torch.Size([1, 5])
    """

    _tied_weights_keys = TIED

    def __init__(self, config: LinformerConfig) -> None:
        if not config.is_decoder:
            config = LinformerConfig.from_dict(config.to_dict(), is_decoder=True)
            config.check()
        super().__init__(config)
        self.linformer = LinformerModel(config, add_pooling_layer=False)
        self.lm_head = RobertaLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The map to the vocabulary."""
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the map to the vocabulary."""
        self.lm_head.decoder = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # Ours compresses what leaves its window: the model makes the cache that its attention needs.
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Logits of the next token and, with ``labels`` (the tokens themselves), their mean cross-entropy in nats.

        Args:
            input_ids: As in :meth:`LinformerModel.forward`, like those up to ``inputs_embeds``.
            attention_mask: ``(b, n)``, 1 = keep.
            token_type_ids: ``(b, n)``.
            position_ids: ``(b, n)``.
            inputs_embeds: ``(b, n, d)``.
            labels: ``(b, n)``, -100 = none; shifted here.
            cache: From the step before.
            use_cache: Whether to return one.
            logits_to_keep: How many of the last positions get logits; 0 for all.
            num_items_in_batch: Tokens the loss is divided by, where Trainer accumulates gradients.
            kwargs: As in :meth:`LinformerModel.forward`.
        """
        outputs = self.linformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=False if labels is not None else use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LinformerForSequenceClassification(LinformerPreTrainedModel):
    """The encoder with RoBERTa's classification head on each row's first kept token.

    Args:
        config: Its settings; ``num_labels`` classes, 1 for regression.
    """

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.linformer = LinformerModel(config, add_pooling_layer=False)
        self.classifier = RobertaClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits ``(b, num_labels)`` and, with ``labels``, the loss of ``config.problem_type``.

        Args:
            input_ids: As in :meth:`LinformerModel.forward`, like those up to ``inputs_embeds``.
            attention_mask: ``(b, n)``, 1 = keep.
            token_type_ids: ``(b, n)``.
            position_ids: ``(b, n)``.
            inputs_embeds: ``(b, n, d)``.
            labels: Classes ``(b,)``, values ``(b,)`` for regression, or 0/1 ``(b, num_labels)`` for several labels.
            kwargs: As in :meth:`LinformerModel.forward`.
        """
        kwargs.pop("num_items_in_batch", None)
        outputs = self.linformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        padding = None if attention_mask is None else padding_from_attention_mask(attention_mask)
        logits = self.classifier(first_kept(outputs.last_hidden_state, padding)[:, None])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForTokenClassification(LinformerPreTrainedModel):
    """The encoder with one linear map for every token.

    Args:
        config: Its settings; ``num_labels`` classes.
    """

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels or 2
        self.linformer = LinformerModel(config, add_pooling_layer=False)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits ``(b, n, num_labels)`` and, with ``labels`` (-100 = none), their mean cross-entropy in nats.

        Args:
            input_ids: As in :meth:`LinformerModel.forward`, like those up to ``inputs_embeds``.
            attention_mask: ``(b, n)``, 1 = keep.
            token_type_ids: ``(b, n)``.
            position_ids: ``(b, n)``.
            inputs_embeds: ``(b, n, d)``.
            labels: ``(b, n)``.
            kwargs: As in :meth:`LinformerModel.forward`.
        """
        kwargs.pop("num_items_in_batch", None)
        outputs = self.linformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForQuestionAnswering(LinformerPreTrainedModel):
    """The encoder with two logits a token: where an answer starts and where it ends.

    Args:
        config: Its settings.
    """

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__(config)
        self.linformer = LinformerModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Logits ``(b, n)`` of start and end and, with positions, the mean of their two cross-entropies in nats.

        Args:
            input_ids: As in :meth:`LinformerModel.forward`, like those up to ``inputs_embeds``.
            attention_mask: ``(b, n)``, 1 = keep.
            token_type_ids: ``(b, n)``.
            position_ids: ``(b, n)``.
            inputs_embeds: ``(b, n, d)``.
            start_positions: ``(b,)``; outside the text = ignored.
            end_positions: ``(b,)``.
            kwargs: As in :meth:`LinformerModel.forward`.
        """
        kwargs.pop("num_items_in_batch", None)
        outputs = self.linformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
