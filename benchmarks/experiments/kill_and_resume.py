"""Kill a measurement five times, each as soon as a new part has appeared, and compare with an unbroken run.

Writes ``benchmarks/results/kill_and_resume.json``: that no finished part was written again, and the number of values
that differ from the unbroken run's (0 wanted; NaN equals NaN).
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import rankscope
from rankscope._environment import environment

RESULT = Path(__file__).parents[1] / "results" / "kill_and_resume.json"
OPTIONS = ["minilm", "pydoc", "--n", "128", "--windows", "26", "--null-windows", "10", "--out"]
KILLS = 5


def state(parts: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in parts.glob("*.safetensors")}


def main() -> None:
    command = [sys.executable, "-m", "rankscope", "measure", *OPTIONS]
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = Path(folder) / "killed", Path(folder) / "whole"
        parts = killed / "parts"
        kept: dict[str, int] = {}
        rewritten, kills = 0, []
        for _ in range(KILLS):
            process = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while process.poll() is None and len(state(parts)) <= len(kept):
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            code = process.wait()
            now = state(parts)
            rewritten += sum(now.get(name) != stamp for name, stamp in kept.items())
            kept = now
            kills.append({"exit_code": code, "parts": len(kept), "result_there": (killed / "spectrum.nc").exists()})
        subprocess.run([*command, str(killed)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        now = state(parts)
        rewritten += sum(now.get(name) != stamp for name, stamp in kept.items())
        subprocess.run([*command, str(whole)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        a, b = rankscope.load(killed), rankscope.load(whole)
        compared = sum(a[name].size for name in a.data_vars)
        differing = sum(
            int((~((a[name].values == b[name].values) | (np.isnan(a[name].values) & np.isnan(b[name].values)))).sum())
            for name in a.data_vars
        )
    report = {
        "command": " ".join(["rankscope", "measure", *OPTIONS, "DIR"]),
        "kills": kills,
        "finished_parts_rewritten": rewritten,
        "values_compared": compared,
        "values_that_differ": differing,
        "same_variables": set(a.data_vars) == set(b.data_vars),
        "environment": environment(),
    }
    RESULT.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
