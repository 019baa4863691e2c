"""A distance between two equal vectors: finite in forward, but the derivative of sqrt at 0 is infinite."""

import warnings

import torch
from torch import nn

import nantrace


class Distance(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).pow(2).sum(-1).sqrt()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.distance = nn.Linear(3, 4), Distance()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.distance(self.encoder(a), self.encoder(b))


torch.manual_seed(0)
model = Siamese()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
a = torch.randn(3, 3)
b = torch.cat([a[:1], torch.randn(2, 3)])  # the first pair is identical

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"a": a, "b": b}) as tracer:
    loss = model(a, b).mean()
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
