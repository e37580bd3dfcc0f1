"""``transformers.Trainer`` for masked language modelling: the loss by global count, perplexity on held-out windows."""

import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback

from rankscope._errors import RankscopeError
from rankscope.spectrum.parts import write_whole
from rankscope.training.data import IGNORED, MaskedWindows

# Written last into a checkpoint: one without it was cut short and is never resumed from.
WHOLE = "rankscope.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done and wanted, the last loss and perplexity, tokens a second."""

    step: int
    steps: int
    loss: float | None
    perplexity: float | None
    tokens_per_second: float | None


@dataclass
class Clock:
    """What a run has cost so far, over all its resumptions; the seconds since the last checkpoint are lost with it."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    step_seconds: float = 0.0
    step_tokens: int = 0
    peak_memory_bytes: int = 0
    starts: int = 1

    def __post_init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def now(self) -> "Clock":
        """Bring wall, CPU and memory up to date and return the clock."""
        wall, cpu = time.monotonic(), time.process_time()
        self.wall_seconds += wall - self._wall
        self.cpu_seconds += cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory())
        return self

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second of the steps themselves: forward, backward and update."""
        return self.step_tokens / self.step_seconds if self.step_seconds else None


def peak_memory() -> int:
    """Return the largest memory so far: a GPU's, else this process's resident set, in bytes."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def only_at(head: nn.Module, chosen: Tensor) -> Iterator[None]:
    """Within, ``head`` gets the chosen tokens' states ``(tokens, d)`` alone: the others' logits are never wanted.

    A vocabulary costs more than a small model's layers, and only 15 % of the tokens are predicted.

    Args:
        head: A masked language model's, whose forward takes the states ``(b, n, d)`` first.
        chosen: bool ``(b, n)``.
    """
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood, in nats, summed over the masked tokens.

    Args:
        logits: Of the masked tokens, in order, ``(tokens, vocabulary)``.
        labels: ``(b, n)``, −100 where nothing is predicted.
    """
    return nn.functional.cross_entropy(logits.float(), labels[labels != IGNORED], reduction="sum")


class MlmTrainer(Trainer):
    """Trainer whose examples come in the run's own order and whose loss is the mean over all masked tokens of a step.

    The mean is taken over the global batch, whatever the micro-batch and the number of processes.

    Args:
        head: The model's language model head.
        windows: The run's examples in their order.
        eval_windows: Held-out windows.
        **options: Trainer's.
    """

    def __init__(self, *, head: nn.Module, windows: MaskedWindows, eval_windows: MaskedWindows, **options: Any) -> None:
        super().__init__(compute_loss_func=self.mean_loss, train_dataset=windows, eval_dataset=eval_windows, **options)
        self.head, self.windows, self.eval_windows = head, windows, eval_windows
        self.model_accepts_loss_kwargs = False  # the loss is ours, not the model's
        self.remove_callback(PrinterCallback)

    @staticmethod
    def mean_loss(outputs: Any, labels: Tensor, *, num_items_in_batch: Tensor) -> Tensor:
        """The summed loss over the step's masked tokens; Trainer undoes the mean that DDP takes of gradients."""
        return summed_loss(outputs.logits, labels) / num_items_in_batch

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Trainer's own, with logits at masked tokens only."""
        with only_at(self.head, inputs["labels"] != IGNORED):
            return super().compute_loss(model, inputs, *args, **options)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.windows)  # the order is the dataset's

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Perplexity at the masked tokens of all held-out windows, whose masks are the same in every run."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        model: Any = self.model_wrapped if self.is_fsdp_enabled else self.model
        windows, size = self.eval_windows, self.args.per_device_eval_batch_size
        totals = torch.zeros(2, dtype=torch.float64)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            # As many forwards on every process, since a sharded model's are joint; a window too many counts nothing.
            for start in range(0, len(windows), size * world):
                places = [start + rank * size + i for i in range(size)]
                examples = [windows[min(place, len(windows) - 1)] for place in places]
                ids = torch.stack([example["input_ids"] for example in examples]).to(self.args.device)
                labels = torch.stack([example["labels"] for example in examples]).to(self.args.device)
                labels[[place >= len(windows) for place in places]] = IGNORED
                with only_at(self.head, labels != IGNORED), self.compute_loss_context_manager():
                    loss = summed_loss(model(input_ids=ids).logits, labels)
                totals += torch.stack([loss.double().cpu(), (labels != IGNORED).sum().double().cpu()])
        model.train(was_training)
        loss_sum, count = self.accelerator.reduce(totals.float().to(self.args.device), reduction="sum").tolist()
        metrics = {"eval_loss": loss_sum / count, "eval_perplexity": math.exp(min(loss_sum / count, 700.0))}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class RunCallback(TrainerCallback):
    """Costs, progress, the mark of a whole checkpoint, and an end to a run whose loss is no number.

    Args:
        clock: Of the run so far.
        tokens: Tokens a step.
        progress: Told where the run stands, on the first process.
        measure_every: Steps between calls of ``measure``, which is also called at step 0 and at the end.
        measure: Called with the step, on the first process.
    """

    def __init__(
        self,
        clock: Clock,
        tokens: int,
        progress: Callable[[Progress], None] | None,
        measure_every: int | None,
        measure: Callable[[int], None],
    ) -> None:
        self.clock, self.tokens, self.progress = clock, tokens, progress
        self.measure_every, self.measure = measure_every, measure
        self.loss: float | None = None
        self.perplexity: float | None = None
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure fresh weights."""
        if self.measure_every and state.global_step == 0 and state.is_world_process_zero:
            self.measure(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the step's time."""
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Take the step's time; measure; ask for the last point of each curve."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.clock.step_seconds += time.monotonic() - self.began
        self.clock.step_tokens += self.tokens
        last = state.global_step >= state.max_steps
        if last:
            control.should_log = control.should_evaluate = control.should_save = True
        due = self.measure_every and (last or state.global_step % self.measure_every == 0)
        if due and state.is_world_process_zero:
            self.measure(state.global_step)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Tell the progress.

        Raises:
            RankscopeError: The loss is not finite.
        """
        logs = logs or {}
        self.loss = logs.get("loss", self.loss)
        self.perplexity = logs.get("eval_perplexity", self.perplexity)
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise RankscopeError(
                    f"the {name.replace('_', ' ')} is {logs[name]} at step {state.global_step}: lower `learning_rate`, "
                    "raise `warmup_steps`, or use precision float32; earlier checkpoints are kept"
                )
        if self.progress and state.is_world_process_zero:
            speed = self.clock.tokens_per_second
            self.progress(Progress(state.global_step, state.max_steps, self.loss, self.perplexity, speed))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint as whole, once every process has written its part."""
        args.distributed_state.wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_whole(folder / WHOLE, json.dumps(asdict(self.clock.now())).encode())


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest whole checkpoint of a run, or ``None``."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{WHOLE}")]
    return max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)
