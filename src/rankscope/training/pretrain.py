"""Masked language modelling from nothing: the exact Transformer or a Linformer, on one process or many."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.spectrum.parts import disk_error, write_whole
from rankscope.training.args import PretrainArgs, differences
from rankscope.training.build import build_model
from rankscope.training.data import MaskedWindows, Masking, RunOrder
from rankscope.training.run_data import RunData, prepare_data

RESULT = "result.json"
# The held-out masks are the same whatever a run's seed, so that perplexities compare.
EVAL_SEED = 0


def pretrain(args: PretrainArgs, out: str | Path, *, progress: "Callable[[Any], None] | None" = None) -> dict[str, Any]:
    """Pretrain a masked language model; the same call goes on where a killed run stopped.

    Under ``accelerate launch`` each process takes its share of every batch; the curve is that of one process.

    Args:
        args: The run's settings.
        out: Folder of the run: ``settings.json``, ``tokenizer/``, ``data/``, ``checkpoints/``, ``model/``,
            ``spectra/`` and ``result.json``.
        progress: Told where the run stands, with a :class:`rankscope.training.mlm_trainer.Progress`.

    Returns:
        The result, as written to ``out/result.json``; of a finished run, what is there.

    Raises:
        RankscopeError: A setting, text or folder that can't serve, or a loss that is no number.
    """
    from transformers import set_seed

    out = Path(out)
    with quiet():
        options = training_arguments(args, out)
        state = options.distributed_state
        with state.main_process_first():
            finished = claim(args, out, write=state.is_main_process)
            if finished is not None:
                return finished
            try:
                data = prepare_data(args, out)
                set_seed(args.seed % 2**32)
                model = build_model(args, data.tokenizer)
            except RankscopeError:
                if state.is_main_process:
                    release(out)
                raise
        return train(args, out, options, data, model, progress)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Trainer's own chatter off the screen; warnings still show."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    accelerate_log = logging.getLogger("accelerate")
    before = accelerate_log.level
    accelerate_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
        accelerate_log.setLevel(before)


def claim(args: PretrainArgs, out: Path, *, write: bool) -> dict[str, Any] | None:
    """Take the folder for this run, or check that it is this run's; return the result if it is finished.

    Raises:
        RankscopeError: Another run is in the folder (the message names every difference), or it can't be used.
    """
    path = out / "settings.json"
    if path.exists():
        try:
            before = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise RankscopeError(f"{str(path)!r} is damaged ({error}): choose another --out") from None
        wrong = differences(args.settings(), before)
        if wrong:
            raise RankscopeError(
                f"`out` {str(out)!r} holds a run with other settings: {'; '.join(wrong)}. Use the same settings to go "
                "on with it, or another --out"
            )
        if (out / RESULT).exists():
            return json.loads((out / RESULT).read_text())
    elif write:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RankscopeError(f"`out` {str(out)!r} can't be used as a folder: {error.strerror}") from None
        if any((out / name).exists() for name in ("checkpoints", RESULT)):
            raise RankscopeError(f"`out` {str(out)!r} holds a run without settings.json: choose another --out")
        write_whole(path, json.dumps(args.settings(), indent=1, sort_keys=True).encode())
    return None


def release(out: Path) -> None:
    """Give a folder back whose run could not begin, so that the mended command may take it."""
    if (out / "checkpoints").exists():
        return
    (out / "settings.json").unlink(missing_ok=True)
    for name in ("tokenizer", "data"):
        shutil.rmtree(out / name, ignore_errors=True)
    if not any(out.iterdir()):
        out.rmdir()


def training_arguments(args: PretrainArgs, out: Path) -> Any:
    """Return Trainer's arguments for this machine: what each process takes of a batch, and how.

    Raises:
        RankscopeError: The batch can't be shared evenly, or the processor can't do the precision.
    """
    import torch
    from transformers import TrainingArguments

    world = int(os.environ.get("WORLD_SIZE", "1"))
    micro = args.micro_batch_size or max(1, args.batch_size // world)
    if args.batch_size % (micro * world):
        raise RankscopeError(
            f"`batch_size` must be a multiple of micro batch × processes = {micro} × {world}, got {args.batch_size}"
        )
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    if args.precision == "bfloat16" and not on_cpu and not torch.cuda.is_bf16_supported():
        raise RankscopeError("`precision` bfloat16 is not supported by this GPU: use float32")
    check_loggers(args.report_to)
    options = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=args.max_steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=args.batch_size // (micro * world),
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.schedule,
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_epsilon,
        max_grad_norm=args.max_grad_norm,
        bf16=args.precision == "bfloat16",
        seed=args.seed % 2**32,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and world > 1 else None,
        ddp_find_unused_parameters=False if world > 1 else None,
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        label_names=["labels"],
        eval_strategy="steps",
        save_strategy="steps",
        save_total_limit=2,
        logging_steps=args.log_every,
        eval_steps=args.eval_every,
        save_steps=args.save_every,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=args.report_to.split(","),
    )
    options._n_gpu = min(1, options.n_gpu)  # one process, one GPU: several are for accelerate launch
    return options


def check_loggers(report_to: str) -> None:
    """Refuse a logger that Trainer does not know or that is not installed, before anything is written."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for logger in get_reporting_integration_callbacks([] if report_to == "none" else report_to.split(",")):
            logger()
    except (ValueError, RuntimeError, ImportError) as error:
        raise RankscopeError(f"`report_to` {report_to!r} can't be used: {str(error).splitlines()[0]}") from None


def train(
    args: PretrainArgs,
    out: Path,
    options: Any,
    data: RunData,
    model: Any,
    progress: "Callable[[Any], None] | None",
) -> dict[str, Any]:
    """Train, or go on from the last whole checkpoint, and write model and result."""
    from safetensors import SafetensorError

    from rankscope.training.mlm_trainer import WHOLE, Clock, MlmTrainer, RunCallback, last_checkpoint
    from rankscope.training.spectra import measure_step

    checkpoint = last_checkpoint(out / "checkpoints")
    clock = Clock()
    if checkpoint is not None:
        kept = json.loads((checkpoint / WHOLE).read_text())
        clock = Clock(**{**kept, "starts": kept["starts"] + 1})
    options.eval_on_start = checkpoint is None
    examples = args.max_steps * args.batch_size
    order = RunOrder(args.seed, len(data.train))
    trainer = MlmTrainer(
        head=model.lm_head,
        eval_windows=MaskedWindows(data.held_out, Masking(data.tokenizer, EVAL_SEED)),
        model=model,
        args=options,
        windows=MaskedWindows(data.train, Masking(data.tokenizer, args.seed), order, length=examples),
    )

    if trainer.is_fsdp_enabled and args.measure_every:
        raise RankscopeError("`measure_every` needs whole weights on a process, and FSDP shards them: leave it out")

    def measure(step: int) -> None:
        measure_step(model, data.tokenizer, data.held_out_text, args, step, out / "spectra")

    trainer.add_callback(RunCallback(clock, args.batch_size * args.n, progress, args.measure_every, measure))
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.save_model(str(out / "model"))
    except (OSError, SafetensorError) as error:
        raise disk_error(out, error) from None
    except RuntimeError as error:
        # How torch says that its file could not be written.
        if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        raise disk_error(out, error) from None
    result = describe(args, out, data, model, trainer.state.log_history, clock.now())
    if options.distributed_state.is_main_process:
        data.tokenizer.save_pretrained(out / "model")
        (out / "model" / "training_args.bin").unlink(missing_ok=True)  # a pickle; result.json has the settings
        write_whole(out / RESULT, json.dumps(result, indent=1).encode())
    options.distributed_state.wait_for_everyone()
    return result


def describe(
    args: PretrainArgs, out: Path, data: RunData, model: Any, history: list[dict[str, Any]], clock: Any
) -> dict[str, Any]:
    """Return the result: what was reached, by which curve, at what cost, from what."""
    losses = [[row["step"], row["loss"]] for row in history if "loss" in row]
    held_out = [[row["step"], row["eval_loss"], row["eval_perplexity"]] for row in history if "eval_loss" in row]
    tokens = args.max_steps * args.batch_size * args.n
    projected = model.config.projected_length
    return {
        "command": "pretrain",
        "seed": args.seed,
        "steps": args.max_steps,
        "tokens": tokens,
        "loss": losses[-1][1],
        "metrics": {"eval_loss": held_out[-1][1], "perplexity": held_out[-1][2]},
        "curves": {"loss": losses, "eval": held_out},
        "settings": args.settings(),
        "model": {
            "kind": "Transformer" if projected is None else "Linformer",
            "projected_length": projected,
            "projection_sharing": None if projected is None else model.config.projection_sharing,
            "projection": None if projected is None else model.config.projection,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        "data": {
            "corpus": args.corpus,
            "corpus_hash": data.train.corpus_hash,
            "windows": len(data.train),
            "whole_corpus": data.train.whole,
            "epochs": args.max_steps * args.batch_size / len(data.train),
            "held_out": args.eval_corpus or "a twentieth of the corpus, in stretches of 2^15 characters",
            "held_out_windows": len(data.held_out),
            "held_out_tokens": len(data.held_out) * args.n,
            "vocabulary": len(data.tokenizer),
            # What a model that knows nothing scores.
            "uniform_loss": math.log(len(data.tokenizer)),
        },
        "spectra": sorted(path.name for path in (out / "spectra").glob("step-*.nc")),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "wall_seconds": clock.wall_seconds,
        "cpu_seconds": clock.cpu_seconds,
        "tokens_per_second": clock.tokens_per_second,
        "peak_memory_bytes": clock.peak_memory_bytes,
        "starts": clock.starts,
        "environment": environment(),
    }
