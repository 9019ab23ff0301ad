"""What `entp train TASK --init SOURCE` takes over.

From a run its model, its mode and its tokenizer; from a folder in HuggingFace's format the model,
with the tokens that the task needs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from entp import pretrained
from entp.config import SIZES, AnyModelConfig, Mode, ModelConfig, PretrainedConfig
from entp.config.json import model_from_json, run_from_json
from entp.config.upgrade import upgrade_config
from entp.data.tokenizers import tokenizer_at
from entp.errors import InputError
from entp.files import parse_json
from entp.hf import MOST_READ, is_huggingface, refuse_gguf
from entp.tasks.base import TASKS, Task
from entp.tasks.tokens import any_tokenizer_of_run, look_into, tokenizer_of_run

TASK_DECIDES = ("vocab", "input_dim", "outputs")
"""Fields of the model that follow from the task."""
ACCEPTED = (
    "--init takes the --out of an `entp train`, a model that `entp export` wrote, or a folder in "
    "HuggingFace's format with config.json and model.safetensors"
)


class Beginning(Protocol):
    """What a run takes over from what it begins with."""

    @property
    def mode(self) -> Mode:
        """The mode, unless another is given."""

    def task(self, kind: type[Task]) -> Task | None:
        """The task, unless its options say otherwise; None if a field must be given."""

    def measured_on(self, kind: type[Task]) -> Task | None:
        """The task for a measurement without training, unless its options say otherwise."""

    def model_for(self, task: Task, options: Any, changes: dict[str, Any]) -> AnyModelConfig:
        """The model with the inputs and outputs of a task, and with these changes; options: size
        and lora_rank of the command line."""


class RunBeginning(NamedTuple):
    """What a run takes over from another."""

    model: AnyModelConfig
    mode: Mode
    tokenizer: str
    config: dict[str, Any]
    """The whole configuration."""
    folder: Path
    """With the run's tokenizer."""

    def measured_on(self, kind: type[Task]) -> Task | None:
        """The run's own task, or another that reads its tokens."""
        return self._own_task(kind) or self.task(kind)

    def _own_task(self, kind: type[Task]) -> Task | None:
        """The run's task if it is of this kind."""
        named = self.config.get("task")
        name = named.get("name") if isinstance(named, dict) else None
        if name is None or TASKS.get(name) != f"{kind.__module__}:{kind.__qualname__}":
            return None
        return run_from_json(self.config).task

    def task(self, kind: type[Task]) -> Task | None:
        """The task with the run's tokenizer and context length, if it has fields for them."""
        own = {"tokenizer": self.tokenizer, "block": self.model.context_length}
        stored = self.config.get("task")
        if isinstance(stored, dict) and "end" in stored:  # a pretrained model's tokens
            own |= {name: stored[name] for name in ("end", "tokenizer") if name in stored}
            own |= {"vocab": self.model.vocab}
        found = _made(kind, own)
        return None if found is None else found.with_tokenizer(self.folder)

    def model_for(self, task: Task, options: Any, changes: dict[str, Any]) -> AnyModelConfig:
        needs = task.model_needs()
        if isinstance(self.model, PretrainedConfig):
            check_unchanged(options.size, changes)
            return dataclasses.replace(self.model, **adapters(options, self.model))
        refuse_adapters(options)
        own = {name: needs.get(name) for name in TASK_DECIDES}
        size = SIZES[options.size] if options.size is not None else {}
        return dataclasses.replace(self.model, **{**own, **size, **changes})


class FolderBeginning(NamedTuple):
    """What a run takes over from a folder in HuggingFace's format."""

    folder: Path
    mode: Mode = "entp"

    def task(self, kind: type[Task]) -> Task | None:
        """The task with the folder's tokenizer, if it has a field for it."""
        look_into(self.folder)
        try:
            found = _made(kind, {"tokenizer": tokenizer_of_run(self.folder)})
        except InputError:  # a tokenizer that only the model's own texts are cut by
            found = _made(kind, {})
        return None if found is None else self._with_all_tokens(found.for_model(self.folder))

    def _with_all_tokens(self, task: Task) -> Task:
        """A task on text that the folder's own tokenizer cuts, with the tokens that the model has:
        GPT-2's are not filled up to 50304."""
        from entp.hf.vocabulary import reads_own_text

        if "vocab" not in _fields(task) or not reads_own_text(task, self.folder):
            return task
        try:
            tokens = tokenizer_at(self.folder).vocab
        except InputError:  # such a task counts them itself
            return task
        there = self._config().vocab
        return _replace(task, vocab=there) if tokens <= there else task

    def _config(self) -> PretrainedConfig:
        stored: Any = parse_json((self.folder / "config.json").read_bytes())
        return PretrainedConfig(stored)

    def measured_on(self, kind: type[Task]) -> Task | None:
        """The same, with as many tokens as the model reads, up to MOST_READ."""
        found = self.task(kind)
        if found is None or "block" not in _fields(found):
            return found
        return _replace(found, block=min(self._config().context_length, MOST_READ))

    def model_for(self, task: Task, options: Any, changes: dict[str, Any]) -> AnyModelConfig:
        from entp.hf.beginning import read_pretrained

        check_unchanged(options.size, changes)
        return read_pretrained(self.folder, task, **adapters(options)).model


def _fields(task: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(task)}


def _replace(task: Any, **fields: Any) -> Any:
    """The task with other values of fields that it has."""
    return dataclasses.replace(task, **fields)


def _made(kind: type[Task], fields: dict[str, Any]) -> Task | None:
    """A task with those of the fields that it has; None if another one must be given."""
    names = {f.name for f in dataclasses.fields(kind)}
    try:
        return kind(**{name: value for name, value in fields.items() if name in names})
    except TypeError:
        return None


def adapters(options: Any, model: PretrainedConfig | None = None) -> dict[str, Any]:
    """The options of LoRA, which may be those of a model."""
    given = {"lora_rank": options.lora_rank, "lora_alpha": options.lora_alpha}
    own = {} if model is None else {name: getattr(model, name) for name in given}
    found = {**own, **{name: value for name, value in given.items() if value is not None}}
    if options.lora_alpha is not None and not found.get("lora_rank"):
        raise InputError("--lora-alpha needs --lora-rank: give it, or leave --lora-alpha out.")
    return found


def refuse_adapters(options: Any) -> None:
    """InputError for options of LoRA where the model is none of HuggingFace's."""
    if options.lora_rank is not None or options.lora_alpha is not None:
        raise InputError(
            "--lora-rank and --lora-alpha are for models of HuggingFace's: give --init such a "
            "folder, or leave them out."
        )


def check_unchanged(size: str | None, changes: dict[str, Any]) -> None:
    """InputError for options of a shape that the weights decide."""
    given = [*(["--size"] if size is not None else []), *(f"--model.{name}" for name in changes)]
    if given:
        raise InputError(
            f"{given[0].replace('_', '-')} is given, and the shape of a pretrained model is that "
            "of its weights: leave it out."
        )


def read_beginning(folder: Path) -> Beginning:
    """What the run in this folder, one that comes with entp, or a folder of HuggingFace's hands on;
    the run's own task need not be at hand."""
    if not folder.is_dir() and str(folder) in pretrained.names():
        folder = pretrained.HERE / folder
    refuse_gguf(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"there is no run folder {folder} to begin with: {ACCEPTED}.")
    try:
        data = upgrade_config(parse_json(path.read_text()))
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if is_huggingface(folder):
        return FolderBeginning(folder)
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise InputError(f"{path} describes no model: {ACCEPTED}.")
    model = model_from_json(data, str(path))
    tokenizer = any_tokenizer_of_run(folder)
    return RunBeginning(
        model, data.get("mode", "entp"), tokenizer, data, look_into(folder) or folder
    )


def read_weights(source: Path, task: Task, model: AnyModelConfig) -> Any:
    """The weights to begin with, for a run of this task and model."""
    from entp.training.initialise import read_init

    if isinstance(read_beginning(source), RunBeginning):
        return read_init(source)
    from entp.hf.beginning import like, read_pretrained

    if isinstance(model, ModelConfig):
        raise InputError(
            f"{source} is of HuggingFace's and the run's model is not: train another run."
        )
    return read_pretrained(source, task, **like(model))
