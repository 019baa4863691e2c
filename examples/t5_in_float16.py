"""A T5 of `transformers`, randomly initialised, whose second encoder block overflows in float16."""

import warnings

import torch
from transformers import T5Config, T5ForConditionalGeneration

import nantrace

torch.manual_seed(0)
config = T5Config(
    vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
)
model = T5ForConditionalGeneration(config).half()
with torch.no_grad():
    feed_forward = model.encoder.block[1].layer[1].DenseReluDense
    feed_forward.wi.weight.fill_(10.0)
    feed_forward.wo.weight.fill_(300.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
ids = torch.randint(3, 32, (2, 6))

warnings.simplefilter("ignore", nantrace.NantraceWarning)
with nantrace.trace(model, optimizer=optimizer, batch={"ids": ids}) as tracer:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
print(nantrace.report(tracer.trace))
