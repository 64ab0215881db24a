"""Trains a small network in a loop with Accelerate, on two replicas.

torchrun --nproc-per-node 2 examples/loop_accelerate.py --out runs/accelerate
torchrun --nproc-per-node 2 examples/loop_accelerate.py --out runs/accelerate --resume    # goes on after a crash
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farflung


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="runs/accelerate")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--resume", action="store_true")
    given = options.parse_args()

    network = farflung.networks.from_env()
    accelerator = farflung.integrations.accelerate.Accelerator(
        farflung.methods.noloco(every=10), network, cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    torch.manual_seed(0)  # all replicas start from equal weights
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32 * given.epochs)
    numbers = torch.randn(2048, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(numbers), batch_size=16, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

    if given.resume:
        accelerator.load_state(f"{given.out}/state")
    steps = accelerator.sessions[0].step  # 0, or those of the state
    begun, skipped = divmod(2 * steps, len(data))
    for epoch in range(begun, given.epochs):
        data.set_epoch(epoch)
        for (batch,) in accelerator.skip_first_batches(data, skipped) if epoch == begun else data:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.sessions[0].step % 10 == 0:
                accelerator.save_state(f"{given.out}/state")
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()  # all replicas now have the same, averaged weights
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{given.out}/final.pt")
    print(f"replica {network.rank} sent {network.traffic.bytes_sent:,} bytes")


if __name__ == "__main__":
    main()
