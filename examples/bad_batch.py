"""A silent recording, normalised by its peak in the dataset: 0/0 before the model ever sees it."""

import warnings

import torch
from torch import nn

import nantrace

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wav = torch.randn(3, 6)
wav[1] = 0.0
wav = wav / wav.abs().amax(1, keepdim=True)

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"wav": wav}) as tracer:
    loss = model(wav).pow(2).mean()
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
