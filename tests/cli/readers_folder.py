"""The folder of somebody who follows the documentation: the files that its commands name, small enough to train in
seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]

JOB = """
from functools import partial
import torch
from torch import nn
from shoal.job import DecayMatrices, Job, TextData, WarmupCosine, classifier_metrics, cross_entropy

class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

class Net(nn.Module):
    def __init__(self, hidden=32, heads=4, layers=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, hidden), nn.Embedding(16, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

text = bytes(range(32, 122)) * 60
job = Job(
    name="mine", model=Net, train=TextData(text, sequence=16), validation=TextData(text[:2000], sequence=16),
    loss=cross_entropy, optimizer=partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.99)),
    options=DecayMatrices(weight_decay=0.1), schedule=WarmupCosine(steps=8, warmup=2, floor=0.1), clip=1.0,
    global_batch=16, steps=8, evaluate_every=4, metrics=classifier_metrics,
)
"""

SPACE = """
from shoal.job import TensorData

def space(trial):
    hidden, lr = trial.suggest_int("hidden", 4, 16), trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorData(x=x, y=(x.sum(1) > 0).long())
    return Job(
        name="searched", model=lambda: nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 2)), train=data,
        validation=data, loss=cross_entropy, optimizer=partial(torch.optim.SGD, lr=lr), global_batch=16, steps=8,
    )
"""

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

FINETUNE = """
from shoal.job import TextData, from_transformers
job = from_transformers("my-llama", data=TextData(bytes(range(256)) * 20, sequence=16), global_batch=8, steps=4)
"""

CLUSTER = """
device = "A100 SXM4 80GB"
[[level]]
ranks = 2
bandwidth = "300 GB/s"
latency = "7 us"
[[level]]
ranks = 4
bandwidth = "1 Gb/s"
latency = "100 us"
"""

PILOT = "batch,steps,compress\n16,4100,\n32,2600,\n64,1850,\n32,2860,topk(0.01)\n"


def fill(folder: Path) -> None:
    """Writes every file that a command of the documentation reads, but for runs and weights, which `shoal` makes."""
    for name in ("mine.py", "gpt.py"):
        (folder / name).write_text(JOB + SPACE)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "finetune.py").write_text(FINETUNE)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder / "my-llama")
    for name in ("ours.toml", "homes.toml"):
        (folder / name).write_text(CLUSTER)
    (folder / "runs.csv").write_text(PILOT)
    (folder / "a.txt").write_text("A text to be tokenized. " * 20)
    (folder / "more.jsonl").write_text('{"text": "Another text."}\n' * 5)
    (folder / "gpt2").mkdir()
    letters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<end>": len(letters)}, merges=[]))
    tokenizer.save(str(folder / "gpt2" / "tokenizer.json"))
    shutil.copytree(ROOT / "examples", folder / "examples")


SCRIPT = """
import torch.distributed as dist
from shoal.launch.join import join
with join():
    print(dist.get_rank(), dist.get_world_size())
"""
