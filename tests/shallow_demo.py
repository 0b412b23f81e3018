"""The demo model with fewer layers, for tests that draw many tokens, whatever they say."""

import functools
import json
import shutil
from pathlib import Path
from typing import Final

from kept_folders import make_kept_folder
from safetensors.torch import load_file, save_file

from treegen.demo import model_path

_NUM_LAYERS: Final = 2


@functools.cache
def shallow_demo() -> Path:
    """Write the demo model with the first two of its six layers, and return the directory.

    A step takes less than half of the time. The texts vary, but say nothing.
    """
    path = shutil.copytree(model_path(), make_kept_folder() / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": _NUM_LAYERS}))
    left_out = tuple(f"model.layers.{i}." for i in range(_NUM_LAYERS, config["num_hidden_layers"]))
    weights = load_file(path / "model.safetensors")
    kept = {name: weights[name] for name in weights if not name.startswith(left_out)}
    kept["model.norm.weight"] /= 3  # or it would repeat a single token
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path
