"""Things by name: what is wrong with a person's own is told in sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from entp.errors import InputError
from entp.registry import find_named

RAISES = {
    "raise ValueError('steps is -1: it must be at least 1.')": "it must be at least 1. Give",
    "raise ValueError('unknown size. Did you mean small?')": "Did you mean small? Give",
    "import no_such_module_of_entp": "No module named 'no_such_module_of_entp'. Give",
}


@pytest.mark.parametrize(("code", "told"), RAISES.items())
def test_error_of_ones_own_module_ends_with_one_stop(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "entp_test_own.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        find_named("recipe", "entp_test_own:MINE", {}, "module:NAME")
    assert f"{told} module:NAME, importable from here." in str(error.value)
    assert f"cannot be imported: {tmp_path / 'entp_test_own.py'}, line 1: " in str(error.value)


def test_module_that_is_not_there_has_no_line() -> None:
    with pytest.raises(InputError, match="cannot be imported: No module named 'no_such_module'"):
        find_named("recipe", "no_such_module:MINE", {}, "module:NAME")
    with pytest.raises(InputError, match="cannot be imported: module 'math' has no attribute"):
        find_named("recipe", "math:MINE", {}, "module:NAME")
