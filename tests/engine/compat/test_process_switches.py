"""A run switches precision and determinism for its process; afterwards, also after a compiled function, they are as before."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import import_utils

from engine.compat.process_switches import own_precision, restored


def precisions() -> tuple[str, str]:
    return torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision


def test_the_precision_is_as_before_also_after_a_compiled_function_and_can_be_set_again() -> None:
    before = precisions()
    for _ in range(2):
        with restored():
            import_utils.enable_tf32(True)
            assert precisions() == ("tf32", "tf32")
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert precisions() == before
        with restored():
            import_utils.enable_tf32(False)
            assert precisions() == ("ieee", "ieee")
        assert (precisions(), own_precision()) == (before, "none")
    torch._dynamo.reset()


def test_torchs_compiler_still_writes_the_inherited_precision_back() -> None:
    """Once it does not, `restored` need not look at the products' own."""
    with restored():
        import_utils.enable_tf32(True)
        torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
        torch.backends.fp32_precision = "none"
        assert own_precision() == "tf32"
    torch._dynamo.reset()


def test_determinism_is_as_before_also_where_a_run_fails() -> None:
    def fails() -> None:
        with restored():
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.deterministic = True
            raise RuntimeError("amid")

    with pytest.raises(RuntimeError, match="amid"):
        fails()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.deterministic
