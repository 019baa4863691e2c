"""Real model classes of `transformers`, randomly initialised and tiny: no hub, no network.

Dropout, layer drop and time masking stay as the classes have them, so that each random stream is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Program
from tests.zoo.training import TrainingStep, ZooModel

_VOCABULARY, _LENGTH, _BATCH = 64, 8, 2

#: Sizes that most text models share, in the words of their configurations.
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
#: The same in the words of BART and Whisper.
_SMALL_SEQ2SEQ = {
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SMALL_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def _loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _build(model_class: str, config_class: str, config: dict[str, Any], batch: Callable[[], Batch]) -> Program:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    return model.train(), batch(), TrainingStep(torch.optim.Adam(model.parameters(), 1e-3), _loss_of)


def _ids() -> Tensor:
    return torch.randint(3, _VOCABULARY, (_BATCH, _LENGTH))


def _text() -> Batch:
    ids = _ids()
    return {"input_ids": ids, "labels": ids}


def _padded_text() -> Batch:
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.long)
    mask[1, 5:] = 0
    return {**_text(), "attention_mask": mask}


def _classified_text() -> Batch:
    return {"input_ids": _ids(), "labels": torch.tensor([0, 1])}


def _images() -> Batch:
    return {"pixel_values": torch.randn(_BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}


def _spectrogram() -> Batch:
    return {"input_features": torch.randn(_BATCH, 8, 32), "labels": _ids()}


def _waveform() -> Batch:
    return {"input_values": torch.randn(_BATCH, 1600), "labels": torch.randint(1, 20, (_BATCH, 3))}


def _text_and_images() -> Batch:
    return {"input_ids": _ids(), "pixel_values": torch.randn(_BATCH, 3, 32, 32), "return_loss": True}


_GPT2 = {"vocab_size": _VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
_T5 = {"vocab_size": _VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_VIT = {**_SMALL_VISION, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1}
_WHISPER = {**_SMALL_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
_WAV2VEC2 = {
    "vocab_size": 20,
    **_SMALL_VISION,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}
_CLIP = {
    "text_config": {**_SMALL, "eos_token_id": 2},
    "vision_config": {**_SMALL_VISION, "image_size": 32, "patch_size": 8},
    "projection_dim": 16,
}
_DISTILBERT = {"vocab_size": _VOCABULARY, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
_CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}
_MAMBA = {"vocab_size": _VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}

_ROWS: tuple[tuple[str, str, str, dict[str, Any], Callable[[], Batch]], ...] = (
    ("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2, _padded_text),
    ("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED, _padded_text),
    ("t5", "T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}, _padded_text),
    ("bert", "BertForSequenceClassification", "BertConfig", _SMALL, _classified_text),
    ("vit", "ViTForImageClassification", "ViTConfig", _VIT, _images),
    ("whisper", "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, _spectrogram),
    ("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}, _text),
    ("mamba", "MambaForCausalLM", "MambaConfig", _MAMBA, _text),
    ("clip", "CLIPModel", "CLIPConfig", _CLIP, _text_and_images),
    ("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _text),
    ("gemma", "GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}, _text),
    ("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", _DISTILBERT, _classified_text),
    ("bart", "BartForConditionalGeneration", "BartConfig", _SMALL_SEQ2SEQ, _padded_text),
    ("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _WAV2VEC2, _waveform),
    ("resnet", "ResNetForImageClassification", "ResNetConfig", _RESNET, _images),
    ("swin", "SwinForImageClassification", "SwinConfig", _SWIN, _images),
    ("convnext", "ConvNextForImageClassification", "ConvNextConfig", _CONVNEXT, _images),
)

#: Every model of this module.
TRANSFORMERS_MODELS: tuple[ZooModel, ...] = tuple(
    ZooModel(name, partial(_build, model_class, config_class, config, batch))
    for name, model_class, config_class, config, batch in _ROWS
)
