"""``transformers.Trainer`` under internsp: an unmodified causal model whose weights are sharded.

    python examples/transformers_trainer.py                                         # plain Trainer
    torchrun --nproc-per-node 4 examples/transformers_trainer.py --weight 2         # sharded
    torchrun --nproc-per-node 4 examples/transformers_trainer.py --weight 2 --sequence 2
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --weight 2 --lora  # PEFT
    torchrun ... --weight 2 --resume                                                # goes on

The first three print the same losses, because the batch of a step is the same with any number of
processes. Needs transformers and accelerate (``--lora``: peft); downloads nothing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import internsp

LENGTH, BATCH = 32, 16  # tokens per sequence; sequences per step over all processes


def sequences(path: Path, number: int, seed: int) -> list[dict[str, Tensor]]:
    """Bytes of a text; some labels are masked, so that processes have unequal numbers of tokens."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - LENGTH, (number,), generator=generator).tolist()
    found = []
    for index, start in enumerate(starts):
        ids = text[start : start + LENGTH]
        labels = ids.clone()
        labels[: 3 * (index % 4)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def make_model(lora: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small Llama, equal on every rank; ``lora``: frozen in bf16, with adapters in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16 if lora else dtype)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))


def arguments(
    output: str, accumulate: int = 2, sequence: int = 1, **changes: Any
) -> TrainingArguments:
    """Training arguments with the same batch per step for one, two or four processes."""
    rows = BATCH // accumulate // (int(os.environ.get("WORLD_SIZE", "1")) // sequence)
    settings: dict[str, Any] = {
        "output_dir": output, "max_steps": 20, "gradient_accumulation_steps": accumulate,
        "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 10,
        "report_to": [], "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip
    return TrainingArguments(**(settings | changes))


def make_trainer(
    model: nn.Module, args: TrainingArguments, weight: int, text: Path, sequence: int = 1
) -> Trainer:
    """The Trainer; if ``weight`` is above 0, internsp's, with weights sharded over those ranks."""
    data = {
        "train_dataset": sequences(text, 10 * BATCH, seed=1),
        "eval_dataset": sequences(text, 2 * BATCH, seed=2),
    }
    if weight == 0:
        return Trainer(model, args, **data)
    from internsp.clients.trainer import Trainer as Sharded

    mesh = internsp.ParallelMesh.create(weight, sequence, device_type=args.device.type)
    config = internsp.WeightParallelConfig(min_shard_elements=512)
    communicator = internsp.parallelize(model, mesh, config)
    return Sharded(model, args, communicator=communicator, **data)


def main() -> None:
    """Train, evaluate, predict; checkpoints are written to ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weight", type=int, default=0, help="ranks that share each weight")
    parser.add_argument("--sequence", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--lora", action="store_true", help="train adapters of a frozen model")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    parser.add_argument("--output", default="runs/transformers_trainer")
    options = parser.parse_args()
    args = arguments(options.output, sequence=options.sequence)
    text = Path(argparse.__file__)
    model = make_model(options.lora)
    trainer = make_trainer(model, args, options.weight, text, options.sequence)
    trainer.train(resume_from_checkpoint=options.resume)
    found = trainer.predict(sequences(text, BATCH, seed=3))
    if trainer.is_world_process_zero():
        right = (found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean()
        print(f"test loss {found.metrics['test_loss']:.4f}, next byte right: {right:.3f}")
    trainer.save_model()  # on all ranks, because the full model is gathered


if __name__ == "__main__":
    main()
