"""A learning rate of 5: the weights stay finite while they explode, and some later op is only the messenger."""

import warnings

import torch
from torch import nn

import nantrace

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
x, y = torch.randn(8, 4), torch.randn(8, 1)

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"x": x, "y": y}) as tracer:
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
print(nantrace.report(tracer.trace))
