"""What a Linformer model is built from: RoBERTa's settings, the projections beside them."""

from difflib import get_close_matches
from typing import Any

import numpy
from transformers import PreTrainedConfig

from rankscope._errors import RankscopeError, did_you_mean
from rankscope.attention.linformer_causal import ChunkRule
from rankscope.models.linformer_causal_attention import CHUNK_KINDS
from rankscope.models.projections import LENGTH_RULES, PROJECTIONS, SHARING

# What two checkpoints must agree in for the one's projections to fit the other.
PROJECTION_FIELDS = (
    "max_position_embeddings",
    "projected_length",
    "projection_sharing",
    "projection",
    "length_rule",
    "normalize_projection",
    "projection_seed",
    "chunk_size",
    "chunk_rank",
    "window",
)


class LinformerConfig(PreTrainedConfig):
    """Settings of a Linformer, or of the exact Transformer of the same shape.

    Args:
        vocab_size: Tokens.
        hidden_size: d.
        num_hidden_layers: Layers.
        num_attention_heads: Heads a layer; divides ``hidden_size``.
        intermediate_size: Channels inside the feed-forward blocks.
        hidden_act: Activation of the feed-forward blocks.
        hidden_dropout_prob: Dropout of embeddings and layer outputs.
        attention_probs_dropout_prob: Dropout of attention probabilities.
        max_position_embeddings: n, the longest sequence. RoBERTa's ``pad_token_id + 1`` rows before the first
            position are added to the table and not counted here.
        type_vocab_size: Kinds of segments.
        initializer_range: Deviation of fresh weights.
        layer_norm_eps: Of the layer norms.
        projected_length: k; one for each layer; one for each head of each layer (sharing ``"none"``); or ``None``
            for exact attention, which needs no projections.
        projection_sharing: ``"none"``, ``"headwise"``, ``"key_value"`` or ``"layerwise"``.
        projection: A row of ``rankscope.models.projections.PROJECTIONS``; of ``CHUNK_KINDS`` in a decoder.
        length_rule: ``"slice"`` or ``"interpolate"``: what E is at n' < n.
        normalize_projection: Divide compressed keys by the norms of E's rows.
        projection_seed: Seed of the fixed ``"gaussian"`` projections.
        chunk_size: c, tokens a chunk of a decoder.
        chunk_rank: r, keys a chunk outside a decoder's window leaves.
        window: Tokens a decoder's query sees exactly.
        classifier_dropout: Dropout before a classifier; default ``hidden_dropout_prob``.
        is_decoder: Whether attention is causal: then :class:`~rankscope.attention.linformer_causal.ChunkRule` rules
            and k is ``chunk_rank`` a chunk.

    Raises:
        RankscopeError: A name that does not exist, a size that does not fit.

    Example:
        >>> LinformerConfig(max_position_embeddings=512, projected_length=128).projection_sharing
        'headwise'

    References:
        Wang et al. 2020, arXiv 2006.04768, section 4; RoBERTa's layout, Liu et al. 2019, arXiv 1907.11692.
    """

    model_type = "linformer"

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    use_cache: bool = True
    classifier_dropout: float | int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    projected_length: Any = 128
    projection_sharing: str = "headwise"
    projection: str = "learned"
    length_rule: str = "slice"
    normalize_projection: bool = False
    projection_seed: int = 0
    chunk_size: int = 16
    chunk_rank: int = 1
    window: int = 128

    def __post_init__(self, **kwargs: Any) -> None:
        # PreTrainedConfig takes any keyword; one that nearly names a setting of ours is a slip.
        for name in kwargs:
            if get_close_matches(name, PROJECTION_FIELDS, n=1, cutoff=0.8):
                raise RankscopeError(
                    f"LinformerConfig has no setting {name!r}: {did_you_mean(name, PROJECTION_FIELDS)}"
                )
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse settings that no model can be built from.

        Raises:
            RankscopeError: See the class; the projections' own fit is checked when they are built.
        """
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise RankscopeError(
                f"`num_attention_heads` must divide `hidden_size`={self.hidden_size}, got {self.num_attention_heads}"
            )
        if self.max_position_embeddings < 1:
            raise RankscopeError(f"`max_position_embeddings` must be at least 1, got {self.max_position_embeddings}")
        if self.projected_length is None:
            return
        if self.is_decoder:
            CHUNK_KINDS[self.projection]
            ChunkRule(self.chunk_size, self.chunk_rank, self.window)
            return
        PROJECTIONS[self.projection]
        for name, known in (("projection_sharing", SHARING), ("length_rule", LENGTH_RULES)):
            if getattr(self, name) not in known:
                choice = str(getattr(self, name))
                raise RankscopeError(f"`{name}` has no {choice!r}: {did_you_mean(choice, known)}")
        if isinstance(self.projected_length, bool) or not isinstance(self.projected_length, (int, list, tuple)):
            raise RankscopeError(
                "`projected_length` must be one k, one for each layer, one for each head of each layer, or None for "
                f"exact attention, got {self.projected_length!r}"
            )

    @classmethod
    def from_spectrum(cls, result: Any, nuclear_fraction: float = 0.9, **settings: Any) -> "LinformerConfig":
        """Take each layer's k from measured spectra: the rank that holds a share of P's singular values.

        It says what P needs on that text, not what a trained E and F reach: see ``rankscope recommend``.

        Args:
            result: A dataset of :func:`rankscope.measure`, of packed windows.
            nuclear_fraction: The share of Σσ, in (0, 1), that k singular values must hold.
            settings: Further settings. Under sharing ``"none"`` each head gets its own k; under ``"layerwise"`` all
                layers get the largest; else a layer gets its heads' largest.

        Returns:
            A configuration of as many layers, heads and tokens as were measured, unless ``settings`` say otherwise.

        Raises:
            RankscopeError: A share outside (0, 1), spectra of sentences, of some heads only, or not of
                self-attention.
        """
        if not 0 < nuclear_fraction < 1:
            raise RankscopeError(f"`nuclear_fraction` must be in (0, 1), got {nuclear_fraction}")
        n, index = int(result.attrs["n"]), result["index"].values
        name = "nuclear_fraction_low" if "nuclear_fraction_low" in result else "nuclear_fraction"
        curves = result[name].sel(baseline="trained").transpose("layer", "head", "index").values
        if float(index[-1]) <= 1:
            raise RankscopeError("`result` holds spectra of sentences, whose ranks are shares: measure packed windows")
        if kinds := sorted({str(kind) for kind in result["kind"].values} - {"self/encoder"}):
            raise RankscopeError(f"`result` must be of an encoder's self-attention alone, got {', '.join(kinds)} too")
        if numpy.isnan(curves).any():
            raise RankscopeError("`result` lacks some heads: measure all layers and heads")
        reached = curves >= nuclear_fraction
        heads = numpy.where(reached.any(-1), index[reached.argmax(-1)], n).astype(int)
        sharing = settings.get("projection_sharing", cls.projection_sharing)
        k: Any = {"none": heads.tolist(), "layerwise": int(heads.max())}.get(sharing, heads.max(1).tolist())
        measured = {
            "num_hidden_layers": heads.shape[0],
            "num_attention_heads": heads.shape[1],
            "max_position_embeddings": n,
            "projected_length": k,
        }
        return cls(**(measured | settings))

    @property
    def exact(self) -> bool:
        """Whether attention is exact: no projections."""
        return self.projected_length is None

    @property
    def position_offset(self) -> int:
        """Rows of the position table before the first token's, as in RoBERTa."""
        return 0 if self.pad_token_id is None else self.pad_token_id + 1

    @property
    def rule(self) -> ChunkRule:
        """How a decoder cuts the sequence."""
        return ChunkRule(self.chunk_size, self.chunk_rank, self.window)


def differences(ours: LinformerConfig, theirs: LinformerConfig) -> list[str]:
    """Name every setting of the projections in which two configurations differ."""
    return [
        f"{name} is {getattr(theirs, name)!r} in the checkpoint and {getattr(ours, name)!r} here"
        for name in PROJECTION_FIELDS
        if getattr(ours, name) != getattr(theirs, name)
    ]
