"""One of two replicas, for tests over torch.distributed: `python torch_trainers.py CASE - OUT`.

Each trainer and a plain loop hold the same three rounds, with noloco and with diloco. What is left in OUT: for each
method and trainer the weights at the end, and the bytes that were sent from one round to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from problem import flat, small_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from farflung import methods
from farflung.integrations.accelerate import Accelerator
from farflung.integrations.lightning import Rounds as LightningRounds
from farflung.integrations.transformers import Rounds
from farflung.methods import Method
from farflung.networks import TorchNetwork

METHODS: dict[str, Callable[[], Method]] = {
    "noloco": lambda: methods.noloco(every=4),
    "diloco": lambda: methods.diloco(every=4),
}
SAMPLES = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
STEPS, BATCH = 12, 2
Sent = list[int]


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def noting(network: TorchNetwork, sent: Sent) -> Callable[[Any], None]:
    return lambda round: sent.append(network.traffic.bytes_sent)


def plain(method: Method, network: TorchNetwork, sent: Sent, by_batches: bool = False) -> nn.Module:
    """A user's own loop on the share that a trainer gets: every second sample, or every second batch."""
    model = small_model()
    optimizer = adamw(model)
    batches = (
        SAMPLES.split(BATCH)[network.rank :: 2] if by_batches else SAMPLES[network.rank :: 2].contiguous().split(BATCH)
    )
    with method.attach(model, optimizer, network, on_round=noting(network, sent)) as outer:
        for batch in batches[:STEPS]:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        outer.finish(average_weights=True)
    return model


class Judged(nn.Module):
    """A model that tells its loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, x)}


def arguments(out: Path, **settings: Any) -> TrainingArguments:
    usual = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential"}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(str(out), **{**usual, **quiet, **settings})


def huggingface(method: Method, network: TorchNetwork, sent: Sent, out: Path) -> nn.Module:
    model = Judged()
    optimizer = adamw(model)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    data = [{"x": sample} for sample in SAMPLES]
    rounds = Rounds(method, network, on_round=noting(network, sent))
    args = arguments(out, max_grad_norm=0)
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, constant), callbacks=[rounds])
    trainer.train()
    assert trainer.model_wrapped is model  # and not in DistributedDataParallel
    return model


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def by_lightning(method: Method, network: TorchNetwork, sent: Sent, out: Path) -> nn.Module:
    model = Module()
    rounds = LightningRounds(method, network, on_round=noting(network, sent))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=STEPS, accelerator="cpu", devices=1, callbacks=[rounds], **quiet)  # type: ignore[arg-type]
    trainer.fit(model, DataLoader(TensorDataset(SAMPLES), BATCH))
    return model


def by_accelerate(method: Method, network: TorchNetwork, sent: Sent, out: Path) -> nn.Module:
    accelerator = Accelerator(method, network, {"on_round": noting(network, sent)}, cpu=True)
    model = small_model()
    data = DataLoader(TensorDataset(SAMPLES), BATCH)
    model, optimizer, data = accelerator.prepare(model, adamw(model), data)
    for (batch,) in data:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return model


def lora(network: TorchNetwork, out: Path) -> dict[str, Any]:
    """A round of adapters alone, with accumulated gradients under bfloat16."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    adapted = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(LlamaForCausalLM(shape), adapted)
    numbers = torch.randint(32, (96, 8), generator=torch.Generator().manual_seed(4))
    data = [{"input_ids": row, "labels": row} for row in numbers]
    sent: Sent = []
    rounds = Rounds(methods.noloco(every=4), network, on_round=noting(network, sent))
    args = arguments(out, gradient_accumulation_steps=2, bf16=True)
    Trainer(model, args, train_dataset=data, callbacks=[rounds]).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"sent": sent, "values": sum(one.numel() for one in trained), "weights": flat(nn.ParameterList(trained))}


def main(out: Path) -> None:
    network = TorchNetwork.from_env(starting=60)
    trainers = {"huggingface": huggingface, "lightning": by_lightning, "accelerate": by_accelerate}
    seen: dict[str, Any] = {}
    for name, method in METHODS.items():
        for by_batches in (False, True):
            sent: Sent = []
            seen[f"{name} plain {by_batches}"] = flat(plain(method(), network, sent, by_batches)), sent
        for trainer, train in trainers.items():
            sent = []
            seen[f"{name} {trainer}"] = flat(train(method(), network, sent, out / trainer)), sent
    seen["lora"] = lora(network, out / "lora")
    torch.save(seen, out / f"{network.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[3]))
