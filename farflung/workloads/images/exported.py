"""What stands beside exported weights: the classes' names, and how to draw."""

from __future__ import annotations

import json
from pathlib import Path

from farflung.files import write_text
from farflung.workloads.images.network import MOMENTS, STEPS
from farflung.workloads.images.pictures import Form

CLASSES = "classes.json"
"""The file of the classes' names, in the order of their numbers."""
README = """# A network that draws

It draws pictures of {height}×{width} pixels. The names of their classes are in `classes.json`, in the order of their
numbers. It was trained with farflung, by flow matching, and is a `UNet2DModel` of
[diffusers](https://huggingface.co/docs/diffusers). This, run in this folder, draws one picture of each class:

```python
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UNet2DModel
from PIL import Image

classes = json.loads(Path("classes.json").read_text())
model = UNet2DModel.from_pretrained(".")
scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps={moments})
scheduler.set_timesteps(sigmas=np.linspace(1, 1 / {steps}, {steps}))
labels = torch.arange(len(classes))
pictures = torch.randn(len(labels), {channels}, {height}, {width})
for moment in scheduler.timesteps:
    with torch.no_grad():
        flow = model(pictures, moment, labels).sample
    pictures = scheduler.step(flow, moment, pictures).prev_sample
for name, picture in zip(classes, pictures):
    pixels = ((picture.clamp(-1, 1) + 1) * 127.5).byte().permute(1, 2, 0).squeeze(-1)
    Image.fromarray(pixels.numpy()).save(f"{{name}}.png")
```
"""


def write_beside(folder: Path, form: Form) -> None:
    """Writes `classes.json` and a README into a folder of weights."""
    write_text(folder / CLASSES, json.dumps(form.classes, ensure_ascii=False, indent=1))
    channels, height, width = form.shape
    text = README.format(channels=channels, height=height, width=width, moments=MOMENTS, steps=STEPS)
    write_text(folder / "README.md", text)
