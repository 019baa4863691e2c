"""GradScaler skips the update of a step that overflowed, but BatchNorm has kept its infinite statistics."""

import warnings

import torch
from torch import nn

import nantrace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.proj(x).float()))


torch.manual_seed(0)
model = Net()
nn.init.ones_(model.proj.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
batches = [torch.full((6, 3), 6e4), torch.randn(6, 3)]

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, scaler=scaler) as tracer:
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        scaler.scale(output.float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
print(nantrace.report(tracer.trace))
