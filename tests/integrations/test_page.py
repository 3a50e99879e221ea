"""docs/integrations.md: its code runs with the real libraries, and its table lists every rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import keepleft as kl
from integration_models import TEXTS, TinyModel, next_token_loss, tiny_llama, tiny_tokenizer
from integration_scripts import import_library
from keepleft.integrations import collator

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
LIBRARIES = ["transformers", "trl", "lightning", "accelerate", "lm_eval", "torch"]


def surroundings(library: str, folder: Path, honest: bool) -> dict[str, Any]:
    """The names that a block takes from the reader's own script."""
    tokens = torch.tensor(TEXTS)
    options: dict[str, Any] = {"output_dir": str(folder), "max_steps": 2, "use_cpu": True, "report_to": []}
    options |= {"save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 2}
    if library == "transformers":
        from transformers import TrainingArguments

        dataset = [{"input_ids": text, "labels": text} for text in tokens]
        return {"model": tiny_llama(honest), "args": TrainingArguments(**options), "dataset": dataset}
    if library == "trl":
        from datasets import Dataset
        from trl import SFTConfig

        return {
            "model": tiny_llama(honest),
            "sft_args": SFTConfig(**options, bf16=False),
            "dataset": Dataset.from_dict({"input_ids": TEXTS}),
            "tokenizer": tiny_tokenizer(),
        }
    if library == "lightning":
        from lightning.pytorch import LightningModule

        class Task(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = TinyModel(honest)

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                return next_token_loss(self.model(batch), batch)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.1)

        return {"task": Task(), "loader": torch.utils.data.DataLoader(tokens, batch_size=2)}
    if library == "accelerate":
        model = tiny_llama(honest)
        rows = [{"input_ids": text, "labels": text} for text in tokens]
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
            "loader": torch.utils.data.DataLoader(rows, batch_size=2),
        }
    if library == "lm_eval":
        return {"model": tiny_llama(honest), "tokenizer": tiny_tokenizer(), "tasks": []}
    return {}


def test_there_is_a_block_for_each_library():
    assert len(BLOCKS) == len(LIBRARIES)
    for library, block in zip(LIBRARIES, BLOCKS, strict=True):
        assert re.search(rf"^(from|import) {library}\b", block, re.M)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_stops_a_model_that_leaks_and_runs_an_honest_one(library, tmp_path, monkeypatch, capsys):
    import_library(library)
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[LIBRARIES.index(library)]
    if library == "lm_eval":
        import lm_eval

        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda lm, tasks: {"results": lm})
    if library == "accelerate":
        from accelerate.state import AcceleratorState

        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
    exec(block, surroundings(library, tmp_path, honest=True))
    if library != "torch":
        with pytest.raises(kl.LeakError, match="its future"):
            exec(block, surroundings(library, tmp_path, honest=False))


def test_the_table_lists_every_rule_of_batches():
    source = Path(collator.__file__).read_text("utf-8")
    rules = set(re.findall(r'self\.add\(\s*"([a-z-]+)"', source))
    table = PAGE[PAGE.index("| rule |") :]
    assert rules == set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M))
    assert len(rules) == 8


def test_the_plugin_and_its_settings_are_named_as_they_are():
    from keepleft.integrations.axolotl_settings import AuditSettings

    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    config = yaml.safe_load(block)
    (name,) = config.pop("plugins")
    path = ROOT / "src" / Path(*name.split(".")[:-1]).with_suffix(".py")
    assert f"class {name.rpartition('.')[2]}(" in path.read_text("utf-8")
    AuditSettings(**config)
    assert config.keys() <= AuditSettings.model_fields.keys()
