"""A GPT and its training loop, as one site of a run: python gpt.py RUN_FILE SITE [KEY=VALUE ...]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilocox


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(b, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(b, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder; tokens [b, L] -> logits [b, L, V]."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


run = dilocox.load_run(sys.argv[1], sys.argv[3:])
model = GPT(run.data.vocabulary_size, run.data.sequence_length)
optimizer = torch.optim.AdamW(model.parameters(), lr=run.inner.learning_rate)
with dilocox.site(run, name=sys.argv[2], model=model, optimizer=optimizer) as site:
    for inputs, labels in site.batches():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = site.learning_rate
        optimizer.step()
        optimizer.zero_grad()
        site.step(loss=loss, grad_norm=norm)
print(site.outcome, sum(float(t.double().sum()) for t in model.state_dict().values()))
