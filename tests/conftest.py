"""Fixtures that several test files share; what writes their checkpoints is in checkpoints.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import wide_hf_model as make_wide_hf_model
from checkpoints import write_checkpoint
from transformers import GPT2LMHeadModel


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with wide weights: vocabulary 67, 16 positions, 3 layers of 4 heads of 8."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def wide_hf_model() -> Callable[..., GPT2LMHeadModel]:
    """The function `checkpoints.wide_hf_model(config, seed)`."""
    return make_wide_hf_model
