"""Measures PyTorch's batch-1 decode for comparison on the same GPU: the shape of Llama 3.1 8B with random weights, a static KV
cache, and one compiled step that is replayed as a CUDA graph.

It needs only a CUDA build of PyTorch (2.5 or later) and prints one line of JSON:

    python3 kernels/bench/torch_decode.py
    skep bench engine --suite --device cuda --against 'python3 kernels/bench/torch_decode.py'

With --check it verifies, on the CPU and with a small shape, that cached steps give the same result as one full pass:

    python3 kernels/bench/torch_decode.py --check
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError:
    sys.exit("PyTorch is missing: pip install torch")


@dataclass
class Shape:
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    wide: int = 14336
    vocabulary: int = 128256
    theta: float = 500_000.0
    epsilon: float = 1e-5


TINY = Shape(hidden=256, layers=2, heads=4, kv_heads=2, head=64, wide=512, vocabulary=1024)


class Norm(nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return wide.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, shape, context):
        super().__init__()
        self.shape = shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head
        self.qkv = nn.Linear(shape.hidden, width, bias=False)
        self.out = nn.Linear(shape.heads * shape.head, shape.hidden, bias=False)
        size = (1, shape.kv_heads, context, shape.head)
        self.register_buffer("keys", torch.zeros(size))
        self.register_buffer("values", torch.zeros(size))

    def forward(self, x, turn, mask, positions):
        shape, rows = self.shape, x.shape[1]
        q, k, v = self.qkv(x).split([n * shape.head for n in (shape.heads, shape.kv_heads, shape.kv_heads)], -1)
        q, k, v = (part.view(1, rows, -1, shape.head).transpose(1, 2) for part in (q, k, v))
        q, k = rotate(q, turn), rotate(k, turn)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(1, rows, -1))


class Block(nn.Module):
    def __init__(self, shape, context):
        super().__init__()
        self.attention_norm = Norm(shape.hidden, shape.epsilon)
        self.attention = Attention(shape, context)
        self.mlp_norm = Norm(shape.hidden, shape.epsilon)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.wide, bias=False)
        self.down = nn.Linear(shape.wide, shape.hidden, bias=False)

    def forward(self, x, turn, mask, positions):
        x = x + self.attention(self.attention_norm(x), turn, mask, positions)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, shape, context):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, context) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        inverse = shape.theta ** (-torch.arange(0, shape.head, 2).float() / shape.head)
        angles = torch.outer(torch.arange(context).float(), inverse)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))
        self.register_buffer("seen", torch.ones(context, context, dtype=torch.bool).tril())

    def forward(self, tokens, positions):
        """Returns the logits of the last token. `tokens` is [1, rows]; `positions` holds their positions."""
        x = self.embedding(tokens)
        turn, mask = self.turns[:, positions], self.seen[positions]
        for block in self.blocks:
            x = block(x, turn, mask, positions)
        return self.head(self.norm(x[:, -1]))


def rotate(x, turn):
    cos, sin = (part.type_as(x) for part in turn)
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1)


def make(shape, context, device, dtype):
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = Model(shape, context)
        finally:
            torch.set_default_dtype(default)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model.eval()


@torch.inference_mode()
def measure(tokens, runs):
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this benchmark needs a GPU; --check runs on the CPU")
    torch.set_float32_matmul_precision("high")
    model = make(Shape(), 2 * tokens, "cuda", torch.bfloat16)

    def step(token, position):
        return model(token, position).argmax(-1, keepdim=True)

    # `reduce-overhead` replays the step as a CUDA graph.
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    positions = torch.arange(2 * tokens, device="cuda").split(1)

    def decode():
        token = torch.ones(1, 1, dtype=torch.long, device="cuda")
        for position in positions[:tokens]:
            # The graph's output is overwritten by the next replay.
            token = compiled(token, position).clone()
        torch.cuda.synchronize()

    for _ in range(3):
        decode()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        decode()
        seconds.append(time.perf_counter() - began)
    rate = tokens / statistics.median(seconds)
    card, version = torch.cuda.get_device_name(), torch.__version__
    print(json.dumps({"tok_per_s": rate, "tokens": tokens, "card": card, "torch": version}))


@torch.inference_mode()
def check():
    torch.manual_seed(0)
    model = make(TINY, 16, "cpu", torch.float32)
    tokens = torch.randint(TINY.vocabulary, (1, 9))
    whole = model(tokens, torch.arange(9))
    for position in range(9):
        stepped = model(tokens[:, position : position + 1], torch.tensor([position]))
    error = (whole - stepped).abs().max().item() / whole.abs().max().item()
    if not error < 1e-4:
        sys.exit(f"cached steps differ from a full pass: relative error {error:.2e}")
    print(json.dumps({"check": "passed", "error": error}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="number of tokens decoded per run (default 128)")
    parser.add_argument("--runs", type=int, default=5, help="number of runs, of which the median is reported (default 5)")
    parser.add_argument("--check", action="store_true", help="compare cached steps with a full pass, on the CPU")
    arguments = parser.parse_args()
    check() if arguments.check else measure(arguments.tokens, arguments.runs)
