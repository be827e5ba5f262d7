"""The Python of the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fsdp_support as support
from transformers import AutoConfig, AutoModelForCausalLM

README = Path(__file__).parents[3] / "README.md"


def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**support.TINY)).save_pretrained(
        tmp_path / "my-model"
    )
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+\.\d+ tensor\(\[ 0\.0000, ", done.stdout)
