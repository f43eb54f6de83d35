"""Mamba-3-Lite: a state-space language model whose package is written in notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Mamba3Transformer", "ModelConfig"]

if TYPE_CHECKING:
    from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig


def __getattr__(name: str) -> object:
    # Deferred, so that `mamba3lite --help` does not wait for torch.
    if name == "ModelConfig":
        from mamba3lite.models.config import ModelConfig

        return ModelConfig
    if name == "Mamba3Transformer":
        from mamba3lite.models.transformer import Mamba3Transformer

        return Mamba3Transformer
    raise AttributeError(f"module 'mamba3lite' has no attribute {name!r}")
