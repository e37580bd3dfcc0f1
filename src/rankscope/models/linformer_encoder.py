"""The Linformer encoder and decoder as a Hugging Face model, in RoBERTa's layout and key names.

Everything that is not attention is RoBERTa's own modules. A layer of a Linformer is RoBERTa's with the four linear
maps driven by :func:`~rankscope.models.linformer_attention.attend`; with ``projected_length=None`` it is RoBERTa's
layer itself, whose attention goes through transformers' attention interface (fused by default) and so can be
measured. The only new keys are those of ``encoder.projections``.
"""

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.roberta.modeling_roberta import (
    RobertaEmbeddings,
    RobertaIntermediate,
    RobertaLayer,
    RobertaLMHead,
    RobertaOutput,
    RobertaPooler,
    RobertaSelfAttention,
    RobertaSelfOutput,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from rankscope._errors import RankscopeError
from rankscope._masks import padding_from_attention_mask
from rankscope.attention._layout import TokenLayout, token_layout
from rankscope.attention.linformer_causal import CausalCache
from rankscope.models.configuration_linformer import PROJECTION_FIELDS, LinformerConfig, differences
from rankscope.models.linformer_attention import Plan, Weights, attend, choose_plan, compressed_map
from rankscope.models.linformer_causal_attention import ChunkProjection, attend_causal
from rankscope.models.projections import LinformerProjections, ProjectionPair


class LinformerEmbeddings(RobertaEmbeddings):
    """RoBERTa's embeddings for ``max_position_embeddings`` tokens: its rows before the first position come on top."""

    def __init__(self, config: LinformerConfig) -> None:
        table = LinformerConfig.from_dict(config.to_dict())
        table.max_position_embeddings = config.max_position_embeddings + config.position_offset
        super().__init__(table)


class LinearMaps(nn.Module):
    """The maps to queries, keys and values, under RoBERTa's names."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)


class LinformerAttention(nn.Module):
    """Linformer attention with its output map, residual and norm."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.self = LinearMaps(config)
        self.output = RobertaSelfOutput(config)
        self.num_heads = config.num_attention_heads
        self.dropout = float(config.attention_probs_dropout_prob)

    @property
    def weights(self) -> Weights:
        """The four linear maps."""
        return Weights(self.self.query, self.self.key, self.self.value, self.output.dense)

    def forward(
        self,
        hidden: Tensor,
        projection: ProjectionPair | ChunkProjection,
        layout: TokenLayout,
        cache: CausalCache | None = None,
    ) -> Tensor:
        """Attend, add, normalise: ``(b, n, d)`` to ``(b, n, d)``."""
        dropout = self.dropout if self.training else 0.0
        if isinstance(projection, ChunkProjection):
            attended = attend_causal(
                hidden,
                self.weights,
                projection,
                num_heads=self.num_heads,
                key_padding_mask=layout.padding,
                cache=cache,
                dropout=dropout,
            )
        else:
            attended = attend(
                hidden, self.weights, projection, num_heads=self.num_heads, layout=layout, dropout=dropout
            )
        return self.output.LayerNorm(self.output.dropout(attended) + hidden)

    def compressed_map(
        self, hidden: Tensor, projection: ProjectionPair, layout: TokenLayout, cache: CausalCache | None = None
    ) -> Tensor:
        """The layer's n × k map for the arguments of :meth:`forward`, ``(b, h, n, k)``: what ``measure`` reads."""
        return compressed_map(hidden, self.weights, projection, num_heads=self.num_heads, layout=layout)


class LinformerLayer(GradientCheckpointingLayer):
    """One layer: attention, then the feed-forward block."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.attention = LinformerAttention(config)
        self.intermediate = RobertaIntermediate(config)
        self.output = RobertaOutput(config)

    def forward(
        self,
        hidden: Tensor,
        projection: ProjectionPair | ChunkProjection,
        layout: TokenLayout,
        cache: CausalCache | None = None,
    ) -> Tensor:
        """``(b, n, d)`` to ``(b, n, d)``."""
        attended = self.attention(hidden, projection, layout, cache)
        return self.output(self.intermediate(attended), attended)


def build_projections(config: LinformerConfig) -> LinformerProjections | nn.ModuleList | None:
    """The projections a configuration asks for: a bank, a decoder's chunk projections, or none.

    Raises:
        RankscopeError: They do not fit the configuration.
    """
    if config.exact:
        return None
    if config.is_decoder:
        return nn.ModuleList(
            ChunkProjection(
                config.rule,
                num_heads=config.num_attention_heads,
                width=config.hidden_size,
                kind=config.projection,
                generator=None,
            )
            for _ in range(config.num_hidden_layers)
        )
    return LinformerProjections(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        max_length=config.max_position_embeddings,
        projected_length=config.projected_length,
        sharing=config.projection_sharing,
        kind=config.projection,
        width=config.hidden_size,
        length_rule=config.length_rule,
        normalize=config.normalize_projection,
        generator=None,
    )


class LinformerEncoder(nn.Module):
    """The layers and, once for all of them, the projections."""

    def __init__(self, config: LinformerConfig) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers)
        self.layer = nn.ModuleList(
            [RobertaLayer(config, layer_idx=i) for i in layers]
            if config.exact
            else [LinformerLayer(config) for _ in layers]
        )
        self.projections = build_projections(config)

    def forward(
        self,
        hidden: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the layers; exact ones take ``attention_mask`` as transformers made it, ours ``key_padding_mask``."""
        if self.projections is None:
            for layer in self.layer:
                hidden = layer(hidden, attention_mask, None, None, cache=cache, **kwargs)
            return hidden
        layout = token_layout(key_padding_mask, hidden.shape[0], hidden.shape[1])
        for i, layer in enumerate(self.layer):
            hidden = layer(hidden, self.projections[i], layout, None if cache is None else cache.layers[i])
        return hidden


class DecoderCache:
    """What a Linformer decoder keeps between steps: for each layer its window and compressed chunks.

    Args:
        encoder: The decoder's layers.
    """

    is_compileable = False

    def __init__(self, encoder: LinformerEncoder) -> None:
        every_layer: Any = encoder.projections
        self.layers = [chunks.cache() for chunks in every_layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens taken in, padding included."""
        return self.layers[layer].tokens


UNSPLIT = ["LinformerLayer", "RobertaLayer", "LinformerEmbeddings"]
RECORDED: dict[str, Any] = {"hidden_states": [LinformerLayer, RobertaLayer], "attentions": RobertaSelfAttention}


class LinformerPreTrainedModel(PreTrainedModel):
    """What all Linformer models share: loading, saving, fresh weights, the counts."""

    config: LinformerConfig
    config_class = LinformerConfig
    base_model_prefix = "linformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = UNSPLIT
    _can_record_outputs = RECORDED

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RobertaLMHead):
            nn.init.zeros_(module.bias)
        elif isinstance(module, RobertaEmbeddings):
            positions = torch.arange(module.position_ids.shape[-1], device=module.position_ids.device)
            module.position_ids.copy_(positions.expand(1, -1))
            module.token_type_ids.zero_()
        elif isinstance(module, LinformerProjections):
            fixed = module.kind == "gaussian"
            module.reset_parameters(torch.Generator().manual_seed(self.config.projection_seed) if fixed else None)
        elif isinstance(module, ChunkProjection):
            module.reset_parameters(None)

    @property
    def projection_count(self) -> int:
        """Number of distinct projection matrices; 0 with exact attention."""
        base: Any = self.base_model
        projections = base.encoder.projections
        if isinstance(projections, LinformerProjections):
            return projections.count
        return 0 if projections is None else sum(len(list(chunks.parameters())) for chunks in projections)

    def parameter_report(self) -> dict[str, int]:
        """Count what is stored: the projections (fixed ones too), position embeddings, and all the rest.

        Example:
            >>> config = LinformerConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            ...     intermediate_size=8, max_position_embeddings=64, projected_length=4)
            >>> LinformerModel(config).parameter_report()["projections"]
            512
        """
        base: Any = self.base_model
        bank = base.encoder.projections
        positions = base.embeddings.position_embeddings.weight.numel()
        trained = 0 if bank is None else sum(tensor.numel() for tensor in bank.parameters())
        fixed = 0 if bank is None else sum(tensor.numel() for tensor in bank.buffers())
        rest = sum(parameter.numel() for parameter in self.parameters()) - trained - positions
        return {"projections": trained + fixed, "positions": positions, "rest": rest}

    def plan(self, n: int, *, layer: int = 0, batch: int = 1, grad: bool | None = None) -> Plan:
        """Say which order a layer's products take at length n, and why.

        Raises:
            RankscopeError: Exact attention or a decoder, which have no choice.
        """
        base: Any = self.base_model
        projections = base.encoder.projections
        if not isinstance(projections, LinformerProjections):
            raise RankscopeError("`plan` is a Linformer encoder's: exact attention and decoders have one order only")
        attention = base.encoder.layer[layer].attention
        return choose_plan(
            attention.weights,
            projections[layer],
            num_heads=attention.num_heads,
            n=n,
            batch=batch,
            grad=grad,
            dtype=attention.self.query.weight.dtype,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load a checkpoint, as ``PreTrainedModel.from_pretrained`` does, whose projections must be those asked for.

        Raises:
            RankscopeError: Another n, k, sharing or kind than the checkpoint's is asked for, its file lacks
                projections or holds other ones, or is broken.
        """
        where = str(pretrained_model_name_or_path)
        wished = {name: kwargs[name] for name in PROJECTION_FIELDS if name in kwargs}
        if isinstance(config, LinformerConfig) or wished:
            hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
            given = {name: kwargs[name] for name in hub if name in kwargs}
            theirs = LinformerConfig.from_pretrained(pretrained_model_name_or_path, **given)
            ours = LinformerConfig.from_dict(theirs.to_dict(), **wished) if config is None else config
            if different := differences(ours, theirs):
                raise RankscopeError(
                    f"the checkpoint {where!r} has other projections: {'; '.join(different)}. Leave these settings "
                    "out to take the checkpoint's; `rankscope convert` makes one for another length"
                )
        wants_report = kwargs.pop("output_loading_info", False)
        takes_others = kwargs.pop("ignore_mismatched_sizes", False)
        try:
            # Transformers' own error names no tensor, so the sizes are compared here.
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        except SafetensorError as error:
            raise RankscopeError(
                f"the checkpoint {where!r} can't be loaded: {error}. Its file is broken: fetch or convert it again"
            ) from None
        model, report = loaded
        if report["mismatched_keys"] and not takes_others:
            name, found, wanted = min(report["mismatched_keys"])
            raise RankscopeError(
                f"the checkpoint {where!r} does not fit its config.json: {name!r} is {tuple(found)} in the file and "
                f"{tuple(wanted)} by n, k, sharing or kind of the configuration"
            )
        lacking = sorted(name for name in report["missing_keys"] if "projections." in name)
        if lacking:
            raise RankscopeError(
                f"the checkpoint {where!r} lacks {len(lacking)} projections its config.json asks for, as "
                f"{lacking[0]!r}: it was saved with another sharing or kind"
            )
        return (model, report) if wants_report else model


class LinformerModel(LinformerPreTrainedModel):
    """The bare encoder, or decoder where ``config.is_decoder``.

    Args:
        config: Its settings.
        add_pooling_layer: Whether to add RoBERTa's pooler.

    Example:
        >>> config = LinformerConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8, max_position_embeddings=64, projected_length=4)
        >>> LinformerModel(config)(torch.tensor([[3, 4, 5]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, config: LinformerConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.embeddings = LinformerEmbeddings(config)
        self.encoder = LinformerEncoder(config)
        self.pooler = RobertaPooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the table of word embeddings."""
        self.embeddings.word_embeddings = value

    @can_return_tuple
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Encode tokens.

        Args:
            input_ids: ``(b, n)``.
            attention_mask: ``(b, n)``, 1 = keep; default: every token is kept.
            token_type_ids: ``(b, n)``; default zeros.
            position_ids: ``(b, n)``, counted from ``pad_token_id + 1``; default: each row's kept tokens in order.
            inputs_embeds: ``(b, n, d)`` instead of ``input_ids``.
            cache: A decoder's, from the step before.
            use_cache: Whether a decoder returns one.
            kwargs: ``output_hidden_states``, ``output_attentions`` (exact attention only), ``return_dict``.

        Raises:
            RankscopeError: More than ``max_position_embeddings`` tokens, an expanded mask, or attention maps asked
                of a Linformer.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise RankscopeError("give either `input_ids` or `inputs_embeds`")
        if kwargs.get("output_attentions") and not self.config.exact:
            raise RankscopeError(
                "`output_attentions` needs the map written out: `rankscope measure` reads a Linformer's"
            )
        tokens: Any = inputs_embeds if input_ids is None else input_ids
        shape = tokens.shape[:2]
        n, seen = shape[1], 0 if cache is None else cache.get_seq_length()
        if not torch.compiler.is_compiling() and seen + n > self.config.max_position_embeddings:
            raise RankscopeError(
                f"`input_ids` holds {seen + n} tokens, the model at most {self.config.max_position_embeddings} "
                "(`max_position_embeddings`): cut the text, or convert the checkpoint to more positions"
            )
        padding = None if attention_mask is None else self._padding(attention_mask, shape, seen)
        if self.config.is_decoder and cache is None and use_cache:
            cache = DynamicCache(config=self.config) if self.config.exact else DecoderCache(self.encoder)
        if position_ids is None:
            position_ids = self._positions(input_ids, attention_mask, shape, seen)
        hidden = self.embeddings(
            input_ids=input_ids,
            position_ids=position_ids,
            token_type_ids=torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids,
            inputs_embeds=inputs_embeds,
        )
        if self.config.exact:
            make = create_causal_mask if self.config.is_decoder else create_bidirectional_mask
            extra = {"cache": cache} if self.config.is_decoder else {}
            mask = make(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, **extra)
            hidden = self.encoder(hidden, attention_mask=mask, cache=cache, **kwargs)
        else:
            hidden = self.encoder(hidden, key_padding_mask=padding, cache=cache)
        pooled = None if self.pooler is None else self.pooler(first_kept(hidden, padding)[:, None])
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled, cache=cache if self.config.is_decoder else None
        )

    def _padding(self, attention_mask: Tensor, shape: Any, seen: int) -> Tensor | None:
        """``key_padding_mask`` of these tokens; ``None`` where none is padded or the cache knows already."""
        padding = padding_from_attention_mask(attention_mask)
        if not torch.compiler.is_compiling() and tuple(padding.shape) != (shape[0], seen + shape[1]):
            raise RankscopeError(
                f"`attention_mask` must have shape {(shape[0], seen + shape[1])}, got {tuple(padding.shape)}"
            )
        if self.config.is_decoder and seen:
            return None
        if not torch.compiler.is_compiling() and padding.device.type == "cpu" and not padding.any():
            return None
        return padding

    def _positions(self, input_ids: Tensor | None, attention_mask: Tensor | None, shape: Any, seen: int) -> Tensor:
        """Each row's kept tokens counted from the table's first row on; padding sits at ``pad_token_id``."""
        start = self.config.position_offset
        if attention_mask is not None:
            kept = (~padding_from_attention_mask(attention_mask)).long()
        elif input_ids is not None and self.config.pad_token_id is not None and not seen:
            kept = input_ids.ne(self.config.pad_token_id).long()
        else:
            device = self.embeddings.position_embeddings.weight.device
            return (torch.arange(seen, seen + shape[1], device=device) + start).expand(*shape)
        return ((kept.cumsum(dim=1) - 1 + start) * kept + max(start - 1, 0) * (1 - kept))[:, -shape[1] :]


def first_kept(hidden: Tensor, padding: Tensor | None) -> Tensor:
    """Each row's first token that is no padding, ``(b, d)``: what RoBERTa's classifiers read, also padded left.

    Example:
        >>> first_kept(torch.arange(3.0)[None, :, None], torch.tensor([[True, False, False]]))
        tensor([[1.]])
    """
    if padding is None:
        return hidden[:, 0]
    first = padding.long().argmin(dim=1)
    return hidden.gather(1, first[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)
