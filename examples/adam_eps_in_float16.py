"""Adam on float16 weights: eps=1e-8 is 0 there, so that weights without a gradient become 0/0."""

import warnings

import torch
from torch import nn

import nantrace

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(3, 4).half()

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"x": x}) as tracer:
    loss = model(x)[:, 0].float().mean()  # the second output gets no gradient
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
