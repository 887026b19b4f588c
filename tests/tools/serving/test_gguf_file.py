"""GGUF files against transformers' reader and llama.cpp."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.gguf_models import MODELS, OTHERS, write_model

from dilocox.errors import CheckpointError, ConfigError
from dilocox.models.hf_weights import INDEX_FILE as INDEX
from dilocox.tools.serving.gguf_export import export_gguf
from dilocox.tools.serving.gguf_file import write_gguf

PROMPT = "def the value of self"
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each type."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        write_model(root / name, name)
    return root


def tokens_of(folder: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    found: torch.Tensor = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")[
        "input_ids"
    ]
    return found


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model_and_tokens(
    models: Path, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(models / name, tmp_path / "model.gguf", "f32", name)
    ids = tokens_of(models / name)
    assert (
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)(PROMPT)["input_ids"]
        == ids[0].tolist()
    )
    first = AutoModelForCausalLM.from_pretrained(models / name).eval()
    second = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_continues_a_text_with_the_same_tokens(
    models: Path, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(models / name, tmp_path / "model.gguf", "f32", name)
    model = AutoModelForCausalLM.from_pretrained(models / name).eval()
    ids = tokens_of(models / name)
    made = model.generate(ids, do_sample=False, max_new_tokens=16, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    expected = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(expected) > 8
    assert continued(path) == expected


def continued(path: Path) -> str:
    """Return how llama.cpp continues the prompt with the most likely tokens."""
    import xllamacpp

    said = xllamacpp.CommonParams()
    said.model.path = str(path)
    said.n_ctx, said.warmup, said.verbosity = 128, False, -1
    said.cpuparams.n_threads = 1
    # By default llama.cpp keeps keys and values in f16, which changes tokens.
    said.cache_type_k = said.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    said.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(said)
    answer = server.handle_completions({"prompt": PROMPT, "max_tokens": 16, "temperature": 0})
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize(("dtype", "kind"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_matrices_are_rounded_to_nearest_and_vectors_stay(
    models: Path, tmp_path: Path, dtype: str, kind: torch.dtype
) -> None:
    import gguf

    path = write_gguf(models / "qwen2", tmp_path / "model.gguf", dtype, "qwen2")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    original = read(models / "qwen2")
    matrix = torch.frombuffer(bytearray(found["blk.1.ffn_up.weight"].data.tobytes()), dtype=kind)
    expected = original["model.layers.1.mlp.up_proj.weight"].to(kind)
    assert torch.equal(matrix.view(expected.shape), expected)
    vector = torch.from_numpy(found["output_norm.weight"].data.copy())
    assert torch.equal(vector, original["model.norm.weight"])


def read(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_the_file_names_tokens_template_and_where_text_begins(models: Path, tmp_path: Path) -> None:
    import gguf

    source = shutil.copytree(models / "llama", tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9]}))
    path = export_gguf(source, tmp_path / "out", "f16")
    fields = gguf.GGUFReader(path).fields
    said = {key: field.contents() for key, field in fields.items()}
    assert said["general.name"] == "out"
    assert said["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert said["tokenizer.ggml.pre"] == "gpt-2"
    assert (said["tokenizer.ggml.eos_token_id"], said["tokenizer.ggml.eot_token_id"]) == (0, 9)
    assert said["tokenizer.ggml.add_bos_token"] is False
    assert len(said["tokenizer.ggml.tokens"]) == 272
    assert said["tokenizer.ggml.token_type"][0] == 3
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./out-f16.gguf"
    assert lines[1] == 'PARAMETER stop "<|endoftext|>"'
    assert len(lines) == 3


def test_several_templates_keep_their_names(models: Path, tmp_path: Path) -> None:
    import gguf

    source = shutil.copytree(models / "llama", tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    named = {"default": "plain", "tool_use": "with tools"}
    settings["chat_template"] = [{"name": name, "template": named[name]} for name in named]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = gguf.GGUFReader(export_gguf(source, tmp_path / "out", "f16")).fields
    assert fields["tokenizer.chat_template"].contents() == "plain"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "with tools"


def test_what_f16_cannot_hold_is_refused_and_leaves_nothing(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(models / "llama", tmp_path / "source")
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.ndim > 1:
                tensor[0, 0] = 70_000.0
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="f16 cannot hold; write --gguf bf16 or f32"):
        write_gguf(source, tmp_path / "model.gguf", "f16", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def change(folder: Path, **keys: object) -> None:
    """Change parts of a tokenizer."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    "pre",
    [
        {"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
)
def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(
    models: Path, tmp_path: Path, pre: dict[str, object]
) -> None:
    source = shutil.copytree(models / OTHERS, tmp_path / "source")
    change(source, pre_tokenizer=pre)
    with pytest.raises(ConfigError, match=r"byte-level BPE tokenizers.*convert_hf_to_gguf\.py"):
        export_gguf(source, tmp_path / "out", "f16")


def write(file: Path, content: object) -> None:
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def changed_config(folder: Path, **keys: object) -> None:
    config = folder / "config.json"
    write(config, json.loads(config.read_text()) | keys)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: changed_config(f, hidden_act="gelu"), "hidden_act 'gelu'"),
        (lambda f: changed_config(f, num_hidden_layers=3), "tensor model.layers.2"),
        (lambda f: changed_config(f, vocab_size=400), "config.json asks"),
        (lambda f: write(f / "config.json", "{"), "config.json cannot be read"),
        (lambda f: write(f / INDEX, "{"), f"{INDEX}: cannot be read"),
        (lambda f: write(f / INDEX, []), f"{INDEX}: holds no JSON object"),
        (lambda f: write(f / INDEX, {"metadata": {}}), f"{INDEX}: names no files of this"),
        (
            lambda f: write(f / INDEX, {"weight_map": {"lm_head.weight": "../secret.safetensors"}}),
            f"{INDEX}: names no files of this",
        ),
        (lambda f: write(f / "generation_config.json", "[1]"), "holds no JSON object"),
    ],
)
def test_a_folder_that_does_not_fit_its_configuration_is_refused(
    models: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    source = shutil.copytree(models / "llama", tmp_path / "source")
    change(source)
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(said)):
        write_gguf(source, tmp_path / "model.gguf", "f16", "x")
    assert not (tmp_path / "model.gguf").exists()


def test_a_folder_that_is_not_empty_and_one_without_a_model_are_refused(
    models: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is not empty"):
        export_gguf(models / "llama", models / "qwen2")
    with pytest.raises(CheckpointError, match="no model is here"):
        export_gguf(tmp_path, tmp_path / "out")
    (models / "llama" / "link").symlink_to("/etc/hostname")
    try:
        with pytest.raises(CheckpointError, match="link"):
            export_gguf(models / "llama", tmp_path / "out")
    finally:
        (models / "llama" / "link").unlink()
