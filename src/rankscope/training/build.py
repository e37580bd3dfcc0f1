"""The model of a run: a Linformer or the exact Transformer, by one configuration."""

from typing import TYPE_CHECKING, Any

from rankscope._errors import RankscopeError, did_you_mean
from rankscope.training.args import PretrainArgs

if TYPE_CHECKING:
    from rankscope.models.configuration_linformer import LinformerConfig

# Settings of the configuration that follow from the run's n and tokenizer.
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
DERIVED = ("vocab_size", "max_position_embeddings", *SPECIAL_IDS)
# Settings of decoders, which masked language modelling has no use for.
OF_DECODERS = ("is_decoder", "add_cross_attention", "use_cache", "chunk_size", "chunk_rank", "window")


def model_keywords() -> list[str]:
    """Return the keywords that a run's table ``[model]`` may hold.

    Example:
        >>> "projected_length" in model_keywords(), "vocab_size" in model_keywords()
        (True, False)
    """
    from rankscope.models.configuration_linformer import LinformerConfig

    known = [name for name in LinformerConfig.__annotations__ if name not in (*DERIVED, *OF_DECODERS)]
    return [name for name in known if not name.startswith("_") and name != "model_type"]


def build_config(args: PretrainArgs, vocab_size: int, tokenizer: Any = None) -> "LinformerConfig":
    """Return the model's configuration.

    Args:
        args: The run's settings.
        vocab_size: Number of token ids.
        tokenizer: Tells the special tokens' ids; RoBERTa's without it.

    Raises:
        RankscopeError: A keyword that the configuration does not have, or a value it refuses.
    """
    from rankscope.models.configuration_linformer import LinformerConfig

    known = model_keywords()
    for name in args.model:
        if name in DERIVED:
            raise RankscopeError(f"`model.{name}` follows from the run's n and tokenizer: leave it out")
        if name not in known:
            raise RankscopeError(f"`model` has no keyword {name!r}: {did_you_mean(name, known)}")
    derived: dict[str, Any] = {"vocab_size": vocab_size, "max_position_embeddings": args.n}
    if tokenizer is not None:
        derived |= {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    try:
        return LinformerConfig(**args.model, **derived)
    except RankscopeError:
        raise
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RankscopeError(f"`model` has a setting that can't serve: {reason}") from None


def build_model(args: PretrainArgs, tokenizer: Any) -> Any:
    """Return the model with fresh weights, drawn from PyTorch's global generator."""
    from rankscope.models.modeling_linformer import LinformerForMaskedLM

    return LinformerForMaskedLM(build_config(args, len(tokenizer), tokenizer))
