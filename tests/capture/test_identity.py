"""A traced step is the untraced step, bit for bit: outputs, gradients, parameters, optimizer state, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nantrace.capture.tracer import Tracer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Recorded:
    """What one run leaves: every tensor's bits, and the state of the random number generators."""

    def __init__(self, model: nn.Module, tensors: list[torch.Tensor]) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        everything = [*tensors, *gradients, *model.state_dict().values()]
        self.bits = [t.detach().clone() for t in everything if isinstance(t, torch.Tensor)]
        self.strides = [t.stride() for t in everything if isinstance(t, torch.Tensor)]
        self.rng = torch.get_rng_state()
        self.numpy = np.random.get_state()[1].copy()

    def assert_equals(self, other: Recorded) -> None:
        assert len(self.bits) == len(other.bits)
        for mine, theirs in zip(self.bits, other.bits, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(_bytes(mine), _bytes(theirs))
        assert self.strides == other.strides
        assert torch.equal(self.rng, other.rng)
        assert (self.numpy == other.numpy).all()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.GELU(), nn.Linear(12, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return self.last(hidden)


class Residual(nn.Module):
    """In-place ops, views of outputs that are written to, an identity and an output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.same = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Identity()
        self.split, self.unused, self.last = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden += 0.5
        hidden = self.same(self.relu(hidden))
        left, right = self.split(hidden).chunk(2, dim=1)
        self.unused(hidden)
        mixed = left * right
        mixed[:, 0].mul_(2)
        return self.last(mixed)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(6, 5, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x.unsqueeze(1).expand(-1, 4, -1))[0][:, -1])


class Keywords(nn.Module):
    """Called with keyword arguments only; puts out a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(6, 6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.inner(input1=x, input2=x.flip(0)), "extra": [x, {"deep": x * 2}]}


class TwiceShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.shared(torch.tanh(self.shared(x)))))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(24, 3),
    ).to(torch.float32)


def weight_normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 3),
    "conv_batchnorm_dropout": convolutional,
    "residual_inplace": Residual,
    "gru": Recurrent,
    "shared": TwiceShared,
    "keywords_dict": Keywords,
    "weight_norm": weight_normed,
    "checkpoint_reentrant": lambda: Checkpointed(True),
    "checkpoint": lambda: Checkpointed(False),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    "embedding_bag": lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(dim=-1), nn.Linear(6, 3)),
    "double": lambda: nn.Sequential(nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3)),
}


def _output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x=x)["logits"] if isinstance(model, Keywords) else model(x)
    assert isinstance(output, torch.Tensor)
    return output


def _train(make: Callable[[], nn.Module], traced: bool, steps: int = 3) -> Recorded:
    torch.manual_seed(0)
    np.random.seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outputs = []

    def run() -> None:
        for _ in range(steps):
            x = torch.randn(4, 6, requires_grad=True)
            output = _output(model, x)
            loss = nn.functional.mse_loss(output, torch.ones_like(output))
            loss.backward()
            outputs.extend([output, loss, x.grad])
            optimizer.step()
            optimizer.zero_grad()

    if traced:
        with Tracer(model):
            run()
    else:
        run()
    return Recorded(model, outputs + [v for s in optimizer.state.values() for v in s.values()])


@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(name: str) -> None:
    _train(MODELS[name], traced=True).assert_equals(_train(MODELS[name], traced=False))


def _encode(traced: bool, nested: bool) -> Recorded:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x, mask = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        if not traced:
            return Recorded(model, [model(x, src_key_padding_mask=mask)])
        with Tracer(model, on_nonfinite="ignore") as tracer:  # the mask is -inf inside
            output = model(x, src_key_padding_mask=mask)
    assert {site.module for site in tracer.trace.sites if site.role.label == "output"} == {"", "layers.0", "layers.1"}
    return Recorded(model, [output])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
def test_an_encoder_in_eval_keeps_its_fused_kernel(nested: bool) -> None:
    calls: list[str] = []
    original = torch._transformer_encoder_layer_fwd

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("fused")
        return original(*args, **kwargs)

    torch._transformer_encoder_layer_fwd = counting
    try:
        _encode(True, nested).assert_equals(_encode(False, nested))
    finally:
        torch._transformer_encoder_layer_fwd = original
    assert len(calls) == 4  # two layers, traced and not


def _mixed(traced: bool, fused: bool) -> Recorded:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses: list[torch.Tensor] = []

    def run() -> None:
        for step in range(3):
            x = torch.randn(4, 6) * (1e30 if step == 1 else 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss)

    if traced:
        with Tracer(model, on_nonfinite="ignore"):
            run()
    else:
        run()
    return Recorded(model, [*losses, torch.tensor(scaler.get_scale())])


@pytest.mark.parametrize("fused", [True, False])
def test_mixed_precision_with_a_skipped_step_is_the_same_bit_for_bit(fused: bool) -> None:
    _mixed(True, fused).assert_equals(_mixed(False, fused))


def _closure(traced: bool) -> Recorded:
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    if traced:
        with Tracer(model) as tracer:
            losses = [optimizer.step(closure) for _ in range(2)]
        assert [step["step"] for step in tracer.trace.steps] == [0, 1]
    else:
        losses = [optimizer.step(closure) for _ in range(2)]
    return Recorded(model, losses)


def test_an_optimizer_with_a_closure_is_the_same_bit_for_bit() -> None:
    _closure(True).assert_equals(_closure(False))


def test_memory_format_of_gradients_is_the_same() -> None:
    def run(traced: bool) -> Recorded:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        with Tracer(model) if traced else torch.enable_grad():
            output = model(x)
            output.mean().backward()
        return Recorded(model, [output, x.grad])

    run(True).assert_equals(run(False))
