"""A cross-entropy written by hand: the softmax underflows to 0, and 0 * log(0) is NaN."""

import warnings

import torch
from torch import nn

import nantrace


class CrossEntropyByHand(nn.Module):
    def forward(self, probability: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -(target * torch.log(probability)).sum(1).mean()


torch.manual_seed(0)
model, criterion = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), CrossEntropyByHand()
with torch.no_grad():
    model[0].weight.mul_(200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.tensor([[1.0, 5.0, 5.0, 5.0], [3.0, 1.0, 3.0, 4.0]])
target = nn.functional.one_hot(torch.tensor([0, 1]), 3).float()

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"x": x, "target": target}) as tracer:
    loss = criterion(model(x), target)
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
