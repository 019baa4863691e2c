"""How a step was conducted: what was called in which order around autocast, scalers, optimizers and schedulers."""
