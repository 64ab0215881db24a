"""Fine-tunes a small Llama with LoRA in TRL's SFTTrainer, on two replicas. Only the adapters travel.

    torchrun --nproc-per-node 2 examples/trainer_lora.py --out runs/lora
    torchrun --nproc-per-node 2 examples/trainer_lora.py --out runs/lora --resume    # goes on after a crash

Model, tokenizer and texts are made here, so nothing is downloaded.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import farflung

WORDS = [
    *("the", "a", "small", "large", "red", "green", "fox", "dog", "bird", "tree"),
    *("sees", "follows", "likes", "finds", "and", "then", ".", "[end]"),
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[end]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[end]", pad_token="[end]")


def make_texts(count: int) -> Dataset:
    """Sentences such as: the small fox sees a bird and then follows the red dog ."""
    drawn = torch.randint(1000, (count, 7), generator=torch.Generator().manual_seed(1)).tolist()
    kinds = [WORDS[:2], WORDS[2:6], WORDS[6:10], WORDS[10:14], WORDS[:2], WORDS[6:10], WORDS[14:17]]
    texts = [" ".join(kind[n % len(kind)] for kind, n in zip(kinds, row, strict=True)) for row in drawn]
    return Dataset.from_list([{"text": text} for text in texts])


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", default="runs/lora")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--resume", action="store_true")
    given = options.parse_args()

    network = farflung.networks.from_env()
    torch.manual_seed(0)  # all replicas start from equal weights
    shape = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(shape),
        args=SFTConfig(
            given.out,
            max_steps=given.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_steps=10,
            logging_steps=10,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=make_texts(512),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
        callbacks=[farflung.integrations.transformers.Rounds(farflung.methods.noloco(every=10), network)],
    )
    trainer.train(resume_from_checkpoint=given.resume)
    if network.rank == 0:
        trainer.save_model(f"{given.out}/final")
    print(f"replica {network.rank} sent {network.traffic.bytes_sent:,} bytes")


if __name__ == "__main__":
    main()
