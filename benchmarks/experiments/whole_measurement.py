"""Windows per second and memory of a whole measurement, forward included, against the naive way and a peer.

Every way runs in a process of its own, in turn (A B C … A B C …), on the same windows of the same text with torch's
default threads; the model is loaded and one forward made before the clock starts. Ways:

- ``naive``: ``output_attentions`` and ``torch.linalg.svdvals`` in float32, a layer at a time;
- ``gram32``, ``gram``: :func:`rankscope.measure` by that method, no nulls;
- ``gram32 with nulls``: three nulls on a quarter of the windows;
- ``attnspectra``: the package of that name, if it can be imported (version 0.1.3 was used); all its metrics, as its
  one-call function computes them.

Memory is the most resident memory seen while measuring, above what the loaded model took. Writes
``benchmarks/results/whole_measurement.json``: medians over rounds, and ratios taken round by round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
WAYS = ("naive", "gram32", "gram", "gram32 with nulls", "attnspectra")
PAGE = 4096


class PeakMemory:
    """Samples resident memory in a thread: the process's own maximum would include loading."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = resident()
        self.running = True
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        """Keep the largest value seen."""
        while self.running:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def child(way: str, windows: int, n: int) -> None:
    """Measure one way and print its numbers as JSON."""
    import torch

    import rankscope
    import rankscope.spectrum.measure
    from rankscope.corpora import open_corpus
    from rankscope.pretrained import load
    from rankscope.windows import packed_windows

    pretrained = load("minilm")
    model, tokenizer = pretrained.model, pretrained.tokenizer
    texts = list(packed_windows(open_corpus("pydoc"), tokenizer, n, limit=windows))
    ids = [torch.tensor([window.input_ids]) for window in texts]
    adapter = None
    if way in ("naive", "attnspectra"):
        model.set_attn_implementation("eager")
    if way == "attnspectra":
        import attnspectra

        adapter = attnspectra.HFTransformerAdapter(model=model, tokenizer=tokenizer, architecture="encoder")
    with torch.no_grad():
        model(ids[0])
    ticks: list[float] = []
    with PeakMemory() as memory:
        start = time.perf_counter()
        if way == "naive":
            with torch.no_grad():
                for window in ids:
                    for P in model(window, output_attentions=True).attentions:
                        torch.linalg.svdvals(P)
        elif way == "attnspectra":
            for window in ids:
                attnspectra.capture_and_compute(adapter, window)
        else:
            rankscope.measure(
                model,
                "pydoc",
                tokenizer=tokenizer,
                n=n,
                windows=windows,
                method=way.partition(" ")[0],
                nulls=None if "nulls" in way else "none",
                null_windows=max(1, windows // 4),
                progress=lambda done, _: ticks.append(time.perf_counter()),
            )
        stop = time.perf_counter()
    # rankscope's start-up (route, self-check) and merge happen once a run, not once a window.
    seconds = ticks[-1] - ticks[0] if ticks else stop - start
    print(
        json.dumps(
            {
                "windows_per_second": windows / seconds,
                "extra_bytes": memory.peak - memory.before,
                "whole_call_seconds": stop - start,
                "torch_threads": torch.get_num_threads(),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=WAYS)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.windows, arguments.n)
        return
    ways = [way for way in WAYS if way != "attnspectra" or importable("attnspectra")]
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            command = [
                sys.executable,
                __file__,
                "--child",
                way,
                "--windows",
                str(arguments.windows),
                "--n",
                str(arguments.n),
            ]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[way].append(json.loads(run.stdout.splitlines()[-1]))
            print(way, rows[way][-1], file=sys.stderr)
    from rankscope._environment import environment

    def ratio(a: str, b: str, key: str) -> float:
        return statistics.median(x[key] / y[key] for x, y in zip(rows[a], rows[b], strict=True))

    speed, memory = "windows_per_second", "extra_bytes"
    ratios = {
        "gram32 against naive, windows per second": ratio("gram32", "naive", speed),
        "gram against naive, windows per second": ratio("gram", "naive", speed),
        "gram32 against naive, extra memory": ratio("gram32", "naive", memory),
        "gram against naive, extra memory": ratio("gram", "naive", memory),
        "time of three nulls on a quarter of the windows, against the trained measurement": ratio(
            "gram32", "gram32 with nulls", speed
        )
        - 1,
    }
    if "attnspectra" in rows:
        ratios["gram32 against attnspectra, windows per second"] = ratio("gram32", "attnspectra", speed)
        ratios["gram against attnspectra, windows per second"] = ratio("gram", "attnspectra", speed)
    report = {
        "n": arguments.n,
        "windows": arguments.windows,
        "rounds": rows,
        "medians": {
            way: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for way, runs in rows.items()
        },
        "ratios_median_of_rounds": ratios,
        "peer_version": metadata.version("attnspectra") if "attnspectra" in rows else None,
        "environment": environment(),
    }
    (RESULTS / "whole_measurement.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(ratios, indent=1))


def importable(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


if __name__ == "__main__":
    main()
