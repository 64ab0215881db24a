"""Trains a small network in Lightning's Trainer, on two replicas.

torchrun --nproc-per-node 2 examples/trainer_lightning.py --out runs/lightning
torchrun --nproc-per-node 2 examples/trainer_lightning.py --out runs/lightning --resume    # goes on after a crash
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farflung


class Adding(lightning.LightningModule):
    """Learns to add numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (numbers,) = batch
        loss = (self.net(numbers) - numbers.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="runs/lightning")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--resume", action="store_true")
    given = options.parse_args()

    network = farflung.networks.from_env()
    lightning.seed_everything(0)  # all replicas start from equal weights
    model = Adding()
    numbers = torch.randn(2048, 8, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        max_steps=given.steps,
        accelerator="cpu",
        devices=1,  # of each replica
        logger=False,
        callbacks=[
            ModelCheckpoint(given.out, save_last=True, every_n_train_steps=20),
            farflung.integrations.lightning.Rounds(farflung.methods.noloco(every=20), network),
        ],
    )
    data = DataLoader(TensorDataset(numbers), batch_size=16, shuffle=True)
    trainer.fit(model, data, ckpt_path="last" if given.resume else None)
    if network.rank == 0:
        torch.save(model.state_dict(), f"{given.out}/final.pt")
    print(f"replica {network.rank} sent {network.traffic.bytes_sent:,} bytes")


if __name__ == "__main__":
    main()
