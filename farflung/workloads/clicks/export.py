"""A recommender as a folder that others load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from farflung.workloads.clicks.encoding import Encoder

README = """# A recommender

A DLRM (arXiv 1906.00091), trained with farflung. It says how likely a click is, of {numbers} columns of numbers and
{tables} columns of categories: {columns}.

- `config.json`: the arguments of `farflung.workloads.clicks.model.DLRM`.
- `model.safetensors`: its weights.
- `encoder.json`: `words`, the categories of each column that have rows, from row 1 on (row 0 is for all others), and
  `centres`, mean and deviation of sign(x) · log(1 + |x|) of each column of numbers x.

```python
import json
from safetensors.torch import load_file
from farflung.workloads.clicks.model import DLRM

model = DLRM(**json.load(open("config.json")))
model.load_state_dict(load_file("model.safetensors"))
chance = model(numbers, rows).sigmoid()  # numbers (clicks, {numbers}) float32, rows (clicks, {tables}) int64
```
"""


def write(target: Path, weights: Mapping[str, Tensor], shape: Mapping[str, Any], encoder: Encoder) -> None:
    """Makes the folder anew."""
    from safetensors.torch import save_file

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(dict(shape)), "utf-8")
    kept = {"words": dict(encoder.words), "centres": dict(encoder.centres)}
    (target / "encoder.json").write_text(json.dumps(kept, ensure_ascii=False), "utf-8")
    columns = ", ".join([*encoder.centres, *encoder.words])
    told = README.format(numbers=len(encoder.centres), tables=len(encoder.words), columns=columns)
    (target / "README.md").write_text(told, "utf-8")
