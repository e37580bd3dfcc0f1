"""Training one classifier and scoring it: the core that finetuning and comparing share."""

import ctypes
import json
import math
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from rankscope._environment import environment
from rankscope._errors import RankscopeError
from rankscope.training.data import keyed_uniform
from rankscope.training.mlm_trainer import peak_memory
from rankscope.training.pretrain import quiet
from rankscope.training.tasks import Split, Task, score

Features = dict[str, NDArray[np.int32]]
ENCODED_AT_ONCE = 256
LOSS_POINTS = 50
# The stream of random numbers that orders rows.
ROWS = 4
EVAL_TOKENS = 2**14


@dataclass(frozen=True)
class Plan:
    """How a classifier is trained.

    Args:
        steps: Updates.
        batch_size: Rows an update.
        micro_batch_size: Rows a forward; the result is the same but for rounding, the memory smaller.
        learning_rate: AdamW's at its peak.
        warmup_share: Of the steps, while the rate rises from 0 to its peak; it then falls to 0, both in a line.
        weight_decay: AdamW's, on matrices only.
        precision: ``float32`` or ``bfloat16`` (by autocast).
        device: ``auto`` or ``cpu``.
    """

    steps: int
    batch_size: int = 32
    micro_batch_size: int | None = None
    learning_rate: float = 2e-5
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    precision: str = "float32"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("batch_size", self.batch_size)):
            if value < 1:
                raise RankscopeError(f"`{name}` must be at least 1, got {value}")
        if self.micro_batch_size is not None and (self.micro_batch_size < 1 or self.batch_size % self.micro_batch_size):
            raise RankscopeError(
                f"`micro_batch_size` must divide `batch_size` = {self.batch_size}, got {self.micro_batch_size}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise RankscopeError(f"`learning_rate` must be above 0, got {self.learning_rate}")
        if not 0 <= self.warmup_share < 1:
            raise RankscopeError(f"`warmup_share` must be in [0, 1), got {self.warmup_share}")
        if self.weight_decay < 0:
            raise RankscopeError(f"`weight_decay` must be at least 0, got {self.weight_decay}")
        for name, chosen, known in (
            ("precision", self.precision, ("float32", "bfloat16")),
            ("device", self.device, ("auto", "cpu")),
        ):
            if chosen not in known:
                raise RankscopeError(f"`{name}` must be one of {', '.join(known)}, got {chosen!r}")


@dataclass(frozen=True)
class Encoded:
    """A split as token ids.

    Args:
        rows: What the tokenizer makes of each row, its padding left for the batch; empty for rows that were not asked
            for.
        labels: ``(rows,)``.
        truncated: Rows longer than n, whose end was cut off.
    """

    rows: Sequence[Features]
    labels: NDArray[np.int64]
    truncated: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, ``(rows,)``."""
        return np.array([len(row["input_ids"]) for row in self.rows], np.int64)


def encode(split: Split, tokenizer: Any, n: int, *, places: Iterable[int] | None = None) -> Encoded:
    """Tokenize a split; a row longer than ``n`` tokens is cut, of a pair the longer text first.

    Args:
        split: Labelled texts.
        tokenizer: A ``transformers`` tokenizer.
        n: Tokens at most, special tokens included.
        places: Which rows; all by default.

    Returns:
        The split as token ids.
    """
    chosen = range(len(split)) if places is None else sorted(set(places))
    rows: list[Features] = [{"input_ids": np.empty(0, np.int32)}] * len(split)
    truncated = 0
    # A few at a time: a tokenizer's own record of a token takes a hundred bytes and more.
    for start in range(0, len(chosen), ENCODED_AT_ONCE):
        some = chosen[start : start + ENCODED_AT_ONCE]
        columns = [list(column) for column in zip(*(split.texts[place] for place in some), strict=True)]
        whole = tokenizer(*columns, return_attention_mask=False, verbose=False)
        names = [name for name in whole if name in ("input_ids", "token_type_ids")]
        for offset, place in enumerate(some):
            row = {name: whole[name][offset] for name in names}
            if len(row["input_ids"]) > n:
                cut = tokenizer(
                    *split.texts[place], truncation="longest_first", max_length=n, return_attention_mask=False
                )
                row = {name: cut[name] for name in names}
                truncated += 1
            rows[place] = {name: np.array(ids, np.int32) for name, ids in row.items()}
    return Encoded(rows, split.labels, truncated)


class OrderedRows(Dataset[dict[str, Any]]):
    """The rows of a whole run: row t is a function of (seed, t), whatever the model.

    Args:
        encoded: The training split.
        seed: Of the run.
        count: Rows of the run.
    """

    def __init__(self, encoded: Encoded, seed: int, count: int) -> None:
        self.encoded, self.seed, self.count = encoded, seed, count

    def __len__(self) -> int:
        return self.count

    def place(self, t: int) -> int:
        """Which row of the split comes t-th: every epoch holds each row once, shuffled anew over the whole split."""
        epoch, offset = divmod(t, len(self.encoded))
        return int(_permutation(self.seed, epoch, len(self.encoded))[offset])

    def __getitem__(self, t: int) -> dict[str, Any]:
        if not 0 <= t < self.count:
            raise IndexError(t)
        place = self.place(t)
        return {**self.encoded.rows[place], "labels": int(self.encoded.labels[place])}

    def places(self) -> list[int]:
        """Which row comes when, through the whole run."""
        return [self.place(t) for t in range(self.count)]

    @property
    def tokens(self) -> int:
        """Tokens of the run, padding not counted."""
        return int(self.encoded.lengths[self.places()].sum())


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    return np.argsort(keyed_uniform(seed, ROWS, epoch, 0, rows), kind="stable")


class Padding:
    """Batches rows, padded to the longest of them and then to a multiple of 8.

    Args:
        tokenizer: Knows the padding.
        n: Never padded beyond.
    """

    def __init__(self, tokenizer: Any, n: int) -> None:
        self.tokenizer, self.n = tokenizer, n

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``attention_mask`` and the tokenizer's further ids ``(b, n)``, ``labels (b,)``."""
        features = [{name: ids.tolist() for name, ids in row.items() if name != "labels"} for row in rows]
        longest = max(len(row["input_ids"]) for row in features)
        width = min(-(-longest // 8) * 8, max(self.n, longest))
        batch = dict(self.tokenizer.pad(features, padding="max_length", max_length=width, return_tensors="pt"))
        if "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch


def rate_shape(progress: float, warmup_share: float) -> float:
    """Learning rate, relative to its peak, when this share of the run is done: up in a line, then down to 0.

    Example:
        >>> [rate_shape(p, 0.25) for p in (0.0, 0.125, 0.25, 0.625, 1.0)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup_share:
        return progress / warmup_share
    return max(0.0, (1 - progress) / (1 - warmup_share))


class ClassifierTrainer(Trainer):
    """Trainer with the run's own order and schedule; the loss is the mean over an update's rows.

    Args:
        plan: How to train.
        **options: Trainer's.
    """

    def __init__(self, *, plan: Plan, **options: Any) -> None:
        super().__init__(compute_loss_func=self.mean_loss, **options)
        self.plan = plan
        self.model_accepts_loss_kwargs = False  # the loss is ours, not the model's
        self.remove_callback(PrinterCallback)

    @staticmethod
    def mean_loss(outputs: Any, labels: Tensor, *, num_items_in_batch: Tensor) -> Tensor:
        """Cross-entropy in nats, over all micro-batches of an update."""
        return nn.functional.cross_entropy(outputs.logits.float(), labels, reduction="sum") / num_items_in_batch

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warm up and fall; taken at the middle of each step, so that neither the first nor the last is for nothing."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer,  # type: ignore[arg-type]
                lambda step: rate_shape((step + 0.5) / num_training_steps, self.plan.warmup_share),
            )
        return self.lr_scheduler


class Watch(TrainerCallback):
    """The run's time, and an end to a run whose loss is no number.

    Args:
        progress: Called with (step, steps, loss).
    """

    def __init__(self, progress: Any = None) -> None:
        self.progress = progress
        self.seconds = self.cpu_seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock with the first step."""
        if state.global_step == 0:
            self._began, self._cpu = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the clock; ask for the last point of the loss curve."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds, self.cpu_seconds = time.monotonic() - self._began, time.process_time() - self._cpu
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Tell the progress.

        Raises:
            RankscopeError: The loss is not finite.
        """
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise RankscopeError(
                f"the loss is {loss} at step {state.global_step}: lower `learning_rate`, or use precision float32"
            )
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps, loss)


def train_and_score(
    model: Any,
    tokenizer: Any,
    task: Task,
    train: Encoded,
    evaluation: Encoded,
    plan: Plan,
    *,
    n: int,
    seed: int,
    progress: Any = None,
) -> dict[str, Any]:
    """Train a classifier in place and score it once, at the end: no checkpoint is chosen by what it scores.

    Args:
        model: With ``logits (b, classes)``.
        tokenizer: Its tokenizer.
        task: What is scored.
        train: Training split.
        evaluation: Split that is scored.
        plan: How to train.
        n: Tokens a row at most.
        seed: Of the order of rows and of dropout.
        progress: Called with (step, steps, loss).

    Returns:
        ``seed, steps, tokens, loss`` (mean over the last fiftieth of the steps), ``loss_curve, metrics`` and what it
        cost; ``tokens`` and ``tokens_per_second`` leave padding out.

    Raises:
        RankscopeError: The loss is no number.
    """
    rows = OrderedRows(train, seed, plan.steps * plan.batch_size)
    micro = plan.micro_batch_size or plan.batch_size
    before = reset_peak()
    watch = Watch(progress)
    with quiet(), TemporaryDirectory(prefix="rankscope-") as scratch, torch.random.fork_rng(devices=[]):
        options = TrainingArguments(
            output_dir=scratch,
            max_steps=plan.steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=plan.batch_size // micro,
            learning_rate=plan.learning_rate,
            weight_decay=plan.weight_decay,
            bf16=plan.precision == "bfloat16",
            use_cpu=plan.device == "cpu" or not torch.cuda.is_available(),
            seed=seed % 2**32,
            train_sampling_strategy="sequential",
            save_strategy="no",
            eval_strategy="no",
            logging_steps=max(1, plan.steps // LOSS_POINTS),
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        )
        options._n_gpu = min(1, options.n_gpu)
        trainer = ClassifierTrainer(
            plan=plan,
            model=model,
            args=options,
            train_dataset=rows,
            data_collator=Padding(tokenizer, n),
            callbacks=[watch],
        )
        trainer.train()
    peak = peak_memory()
    began = time.monotonic()
    predicted = predict(model, tokenizer, evaluation, n)
    eval_seconds = time.monotonic() - began
    curve = [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
    tokens = rows.tokens
    return {
        "seed": seed,
        "steps": plan.steps,
        "tokens": tokens,
        "loss": curve[-1][1],
        "loss_curve": curve,
        "metrics": score(task, evaluation.labels, predicted),
        # 1 says that it gives every row the same answer, whatever its accuracy.
        "one_answer_share": float(np.bincount(predicted).max() / len(predicted)),
        "seconds": watch.seconds,
        "cpu_seconds": watch.cpu_seconds,
        "tokens_per_second": tokens / watch.seconds,
        "eval_seconds": eval_seconds,
        "peak_memory_bytes": peak,
        "memory_before_bytes": before,
        "plan": asdict(plan),
        "environment": environment(),
    }


def predict(model: Any, tokenizer: Any, evaluation: Encoded, n: int) -> NDArray[np.int64]:
    """Return the class with the largest logit of each row ``(rows,)``, rows of like lengths computed together."""
    device = next(model.parameters()).device
    pad, found = Padding(tokenizer, n), np.zeros(len(evaluation), np.int64)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for places in batches_by_length(evaluation.lengths):
            batch = pad([evaluation.rows[place] for place in places])
            logits = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits
            found[places] = logits.argmax(dim=-1).cpu().numpy()
    model.train(was_training)
    return found


def batches_by_length(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield places, longest first, at most :data:`EVAL_TOKENS` tokens a batch with its padding."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        stop = start + max(1, EVAL_TOKENS // int(lengths[order[start]]))
        yield order[start:stop]
        start = stop


def reset_peak() -> int:
    """Let the peak of memory begin anew, and return what is held now, in bytes.

    On a GPU by its allocator, else by the process's resident size (Linux; elsewhere the peak so far stays).
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        # What was freed goes back to the system first, so that what follows is seen whole.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, AttributeError):
        return peak_memory()


def read_json(path: Path) -> Any | None:
    """Return a JSON file's content, ``None`` if it is absent or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
