"""Attention in which the padding mask of one sample hides every key: softmax over a row of -inf is NaN."""

import warnings

import torch
from torch import nn

import nantrace


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attention(x, x, x, key_padding_mask=padding)[0])


torch.manual_seed(0)
model = Block(8)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(2, 4, 8)
padding = torch.tensor([[False, False, False, True], [True, True, True, True]])

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"x": x, "padding": padding}) as tracer:
    loss = model(x, padding)[0].pow(2).mean()  # the fully masked sample is not even in the loss
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
