"""The same training under Accelerate and Lightning, in float16 with a scaler, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.recipes.programs import Parts


def accelerate(p: Parts) -> None:
    """Accumulation, clipping and a scheduler, as its documentation has them.

    Accelerate refuses float16 on a CPU, so that is set after it is made.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler, accelerator.native_amp, accelerator.state._mixed_precision = p.scaler, True, "fp16"
    optimizer = torch.optim.AdamW(p.model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(TensorDataset(p.x, p.y), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(p.model, optimizer, loader, scheduler)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.mse_loss(model(x), y)
                if number == 1:
                    loss = loss * float("inf")  # the scheduler has to wait
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def lightning(p: Parts) -> None:
    """Clipping, accumulation and a scheduler a step, through its plugin for mixed precision."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import MixedPrecision

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = p.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        plugins=[MixedPrecision("16-mixed", "cpu", p.scaler)],
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(p.x, p.y), batch_size=4))
