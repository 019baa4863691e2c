"""A feed-forward block whose second layer leaves float16's range, as in T5 trained in half precision."""

import warnings

import torch
from torch import Tensor, nn

import nantrace


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi, self.act, self.wo = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.act(self.wi(x)))


torch.manual_seed(0)
model = nn.Sequential(*(FeedForward(8, 32) for _ in range(3))).half()
with torch.no_grad():
    model[1].wi.weight.mul_(200)
    model[1].wo.weight.mul_(2000)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(4, 8).half()

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"x": x}) as tracer:
    loss = model(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
