"""The model that a run has made, in other dtypes, and text from it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import dilocox
from dilocox.errors import CheckpointError, ConfigError
from dilocox.tools.release import release
from dilocox.training.chat_prompt import chat_prompt, messages_in
from dilocox.training.run_model import export, generate, model_folder
from tests.support.lm_tasks import write_model

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a small model in two files and the tokenizer that belongs to it."""
    folder = tmp_path_factory.mktemp("run")
    target = write_model(folder / "model", max_shard_size="40KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            found |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_export(run_folder: Path, tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = weights(run_folder / "model")
    target = dilocox.export(run_folder, tmp_path / "out", dtype)
    assert target == tmp_path / "out"
    after = weights(target)
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert tensor.dtype == kind
        assert torch.equal(tensor, before[name].to(kind)), name
    index = json.loads((target / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == kind
    assert AutoTokenizer.from_pretrained(target).eos_token == "<|endoftext|>"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"], "nothing is left beside it"


def test_export_never_writes_over_something(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for target in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is not empty; choose another folder"):
            export(run_folder, target)
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(run_folder, tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="use one of fp32, bf16, fp16"):
        export(run_folder, tmp_path / "new", "fp8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_export_that_fails_leaves_nothing(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export(run_folder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def with_code(folder: Path, kind: str, proof: Path) -> None:
    """A model's folder that would like to run code of its own."""
    (folder / "own.py").write_text(f"import os; os.mkdir({str(proof)!r})\n", encoding="utf-8")
    name = "config.json" if kind != "tokenizer" else "tokenizer_config.json"
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    if kind == "tokenizer":
        content["auto_map"] = {"AutoTokenizer": ["own.Own", None]}
        content["tokenizer_class"] = "Own"
    else:
        content["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
        content["model_type"] = "own"
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_a_strangers_model_runs_no_code_and_asks_for_none(
    run_folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "evil"
    shutil.copytree(run_folder / "model", target)
    with_code(target, kind, tmp_path / "it-ran")
    # transformers asks at the terminal, and with "y" it runs the code.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(CheckpointError):
        generate(target, "def", tokens=1)
    assert not (tmp_path / "it-ran").exists()


def test_pickled_weights_are_not_sampled_from(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "pickled"
    shutil.copytree(run_folder / "model", target)
    torch.save(weights(target), target / "pytorch_model.bin")
    for file in target.glob("model*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        generate(target, "def", tokens=1)


@pytest.mark.parametrize("kind", ["file", "folder", "below", "pipe"])
@pytest.mark.parametrize("dtype", ["fp32", "release"])
def test_what_lies_elsewhere_is_not_copied(
    run_folder: Path, tmp_path: Path, kind: str, dtype: str
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "notes.txt").write_text("mine", encoding="utf-8")
    source = tmp_path / "run" / "model"
    shutil.copytree(run_folder / "model", source)
    link = source / "notes.txt"
    if kind == "pipe":
        os.mkfifo(link)
    elif kind == "below":
        (source / "more").mkdir()
        (source / "more" / "notes.txt").symlink_to(private / "notes.txt")
    else:
        link.symlink_to(private / "notes.txt" if kind == "file" else private)
    copy = release._copy if dtype == "release" else dilocox.export
    with pytest.raises(CheckpointError, match=r"notes\.txt: a (link|pipe)"):
        copy(source.parent, tmp_path / "out", "fp32")
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_links_inside_the_folder_are_copied(run_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(run_folder / "model", source)
    (source / "again.json").symlink_to("config.json")
    assert (dilocox.export(source, tmp_path / "out") / "again.json").is_file()


def test_a_run_folder_and_its_model_folder_both_serve(run_folder: Path, tmp_path: Path) -> None:
    assert model_folder(run_folder) == run_folder / "model"
    assert model_folder(run_folder / "model") == run_folder / "model"
    with pytest.raises(CheckpointError, match="no model is here; a run writes it to"):
        model_folder(tmp_path)


def test_generate(run_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = dilocox.generate(run_folder, "def main", tokens=8, seed=1)
    assert text.startswith("def main")
    assert text == generate(run_folder, "def main", tokens=8, seed=1)
    assert text != generate(run_folder, "def main", tokens=8, seed=2)
    likely = generate(run_folder, "def main", tokens=8, temperature=0)
    assert likely == generate(run_folder, "def main", tokens=8, temperature=0, seed=5)
    # Without a prompt it begins at an end of text, which is not shown.
    assert "<|endoftext|>" not in generate(run_folder, "", tokens=3)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", ""), "no bars and no advice of other libraries"


def test_another_device_computes_in_bf16(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    load, loaded = AutoModelForCausalLM.from_pretrained, []

    def noted(*given: Any, **more: Any) -> Any:
        loaded.append(load(*given, **more))
        return loaded[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    # A processor by another name stands for any device.
    assert generate(run_folder, "def main", tokens=2, device="cpu:0").startswith("def main")
    assert loaded[0].dtype is torch.bfloat16


def test_sampling_follows_the_models_own_distribution(run_folder: Path) -> None:
    """The likeliest token is the argmax of the model's logits, computed here directly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run_folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("class Value", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    expected = tokenizer.decode([*ids[0].tolist(), best], skip_special_tokens=True)
    assert generate(run_folder, "class Value", tokens=1, temperature=0) == expected


def test_what_cannot_be_sampled(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens 0: give 1 or more"):
        generate(run_folder, "x", tokens=0)
    for device in ("banana", "cuda:99"):
        with pytest.raises(ConfigError, match=f"generate: device '{device}' cannot be used"):
            generate(run_folder, "x", device=device)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ConfigError, match=f"seed {seed}: give a number of at most 64 bits"):
            generate(run_folder, "x", seed=seed)
    with pytest.raises(ConfigError, match="temperature -1: give 0"):
        generate(run_folder, "x", temperature=-1)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot be loaded .*; was it changed\?"):
        generate(tmp_path, "x")


CHAT = (
    "{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)


@pytest.fixture
def chat_folder(run_folder: Path, tmp_path: Path) -> Path:
    """The same model with a chat template."""
    shutil.copytree(run_folder / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return tmp_path


def test_a_chat_is_answered_with_the_template(chat_folder: Path) -> None:
    """The answer is what follows the prompt that transformers makes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = chat_folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    talk = [
        {"role": "system", "content": "all values"},
        {"role": "user", "content": "the sum"},
    ]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=5, do_sample=False)[0]
    expected = tokenizer.decode(output[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    answer = generate(chat_folder, talk, chat=True, tokens=5, temperature=0)
    assert answer == expected
    one = generate(chat_folder, "the sum", chat=True, tokens=5, temperature=0)
    assert one == generate(chat_folder, talk[1:], chat=True, tokens=5, temperature=0)


def test_an_answer_ends_where_the_model_ends_it(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained

    def ending(*given: Any, **more: Any) -> Any:
        network = load(*given, **more)
        with torch.no_grad():
            network.lm_head.weight.zero_()  # every logit is 0: token 0, end-of-text, is taken
        return network

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", ending)
    assert generate(chat_folder, "the sum", chat=True, tokens=50, temperature=0) == ""


def test_text_of_a_prompt_is_never_a_special_token(chat_folder: Path) -> None:
    prompt = chat_prompt(chat_folder / "model", "a <|endoftext|> b")
    assert prompt.ids.count(0) == 1
    assert prompt.ends == [0]


def test_what_cannot_be_answered(run_folder: Path, chat_folder: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer has no chat template: set"):
        generate(run_folder, "x", chat=True)
    with pytest.raises(ConfigError, match='prompt: message 1: role "bot"; a role is one of'):
        generate(chat_folder, [{"role": "bot", "content": "x"}], chat=True)
    with pytest.raises(ConfigError, match="prompt: no messages; give at least one"):
        generate(chat_folder, [], chat=True)
    refusing = "{{ raise_exception('not today') }}"
    (chat_folder / "model" / "chat_template.jinja").write_text(refusing, encoding="utf-8")
    with pytest.raises(ConfigError, match="refuses the conversation: not today"):
        generate(chat_folder, "x", chat=True)
    (chat_folder / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"cannot be loaded .*; was the folder changed\?"):
        generate(chat_folder, "x", chat=True)


def test_messages_in_a_prompt() -> None:
    talk = [{"role": "user", "content": "x"}]
    assert messages_in(json.dumps(talk)) == talk
    for text in ("x", "[x]", "[1, 2]", "[]", '{"a": 1}'):
        assert messages_in(text) == text
