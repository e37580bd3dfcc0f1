"""Spectra during pretraining: the model of a step, measured on held-out text as any other model is."""

from pathlib import Path
from typing import Any

import torch
import xarray as xr

from rankscope._errors import RankscopeError
from rankscope.spectrum.dataset import load, save
from rankscope.spectrum.measure import measure
from rankscope.training.args import PretrainArgs

# Noise of the head's own logit deviation: what softmax and scale alone would give.
NULLS = ("gaussian",)
# The same windows and draws at every step and in every run.
SEED = 0


def measure_step(
    model: Any, tokenizer: Any, texts: list[str], args: PretrainArgs, step: int, folder: Path
) -> xr.Dataset:
    """Measure the model as it is and write ``folder/step-XXXXXXXX.nc``.

    The exact Transformer's maps are n × n; a Linformer's n × k, whose ranks are relative to k, as the file says.
    Training goes on as if nothing had been measured: mode and random state are put back.

    Args:
        model: The model in training.
        tokenizer: Its tokenizer.
        texts: Held-out text.
        args: Of the run: n, the number of windows.
        step: Updates so far.
        folder: Where to.

    Returns:
        The measurement.
    """
    was_training = model.training
    with torch.random.fork_rng():
        dataset = measure(
            model,
            texts,
            n=args.n,
            windows=args.measure_windows,
            nulls=NULLS,
            null_windows=args.measure_windows,
            device=str(model.device),
            tokenizer=tokenizer,
            seed=SEED,
        )
    model.train(was_training)
    dataset.attrs |= {"step": step, "corpus": args.eval_corpus or args.corpus, "training_seed": args.seed}
    save(dataset, folder / step_file(step))
    return dataset


def step_file(step: int) -> str:
    """Return the name of a step's file.

    Example:
        >>> step_file(20)
        'step-00000020.nc'
    """
    return f"step-{step:08d}.nc"


def load_steps(folder: Path) -> dict[int, xr.Dataset]:
    """Read a run's measurements, by step.

    Raises:
        RankscopeError: There are none, or one is damaged.
    """
    files = sorted(folder.glob("step-*.nc"))
    if not files:
        raise RankscopeError(f"{str(folder)!r} holds no measurement: give --measure-every to rankscope pretrain")
    return {int(path.stem.removeprefix("step-")): load(path) for path in files}
