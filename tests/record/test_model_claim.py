"""The claim `model`: nothing that a model can be loaded from lies in its folder unchecked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dilocox.record.log.blob_store import Store, Stores
from dilocox.record.log.digests import stage_root, tensor_digest
from dilocox.record.log.state_statements import State
from dilocox.record.log.transparency_log import LogContent
from dilocox.record.verify import claims as c
from dilocox.record.verify.model_files import other_files
from dilocox.record.verify.places import Places
from dilocox.record.verify.remote import LOG_FILES, fetched
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.verify.verify import _Verification
from dilocox.record.writer.rank_recorder import listing_of
from tests.support.architectures import BUFFERS, ROUTED, reference_model, small_config

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, as a run publishes it."""
    folder = tmp_path_factory.mktemp("published") / "model"
    model = reference_model(small_config("llama"), seed=4)
    model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published, tmp_path / "model")
    return tmp_path / "model"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def judged(
    published: Path,
    folder: Path,
    *signed: Path,
    trained: Mapping[str, torch.Tensor] | None = None,
    more: Sequence[str] = (),
) -> c.Finding:
    """What is said of `folder`, of which the tensors of `published` were signed (or those that were
    `trained`), and the other files of `signed` (none: of `published`, too), by one site each. One
    more site has signed the same tensors with the lists `more`."""
    store = Store(str(folder.parent / "store"))
    known = stored(published) if trained is None else trained
    tensors = [tensor_digest(name, tensor) for name, tensor in known.items()]
    listing, root = store.put(listing_of(tensors)), stage_root(tensors).hex()
    states = [
        State("final", site, 0, root, listing, other_files(each), 0)
        for site, each in zip("abc", signed or (published,), strict=False)
    ]
    files = other_files(published)
    states += [State("final", "z", 0, root, each, files, 0) for each in more]
    config = {"site": {"stages": 1, "shards": 1}}
    course = RunHistory("run", "log", {"config": config}, states=states)
    places = Places(folder.parent, model=folder)
    found = _Verification(places, LogContent([], "", ""), lambda what, share: None, course)
    found.stores = Stores([store])
    return found._judge(c.MODEL, found.model)


def test_buffers_that_nobody_signs_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = CONFIG_MAPPING[ROUTED["model_type"]](**ROUTED)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = judged(folder, folder, trained=trained)
    assert found.verdict == "PASS", found.reason
    told = f"not {BUFFERS[0]} and 1 more: buffers that are not trained, and that nobody signs"
    assert found.reason.endswith(told)


def test_a_parameter_that_nobody_signs_fails(tmp_path: Path) -> None:
    """It could hold anything: nothing that was signed leads to it."""
    folder = tmp_path / "model"
    config = CONFIG_MAPPING[ROUTED["model_type"]](**ROUTED)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
    left_out = next(name for name in trained if name.endswith("norm.weight"))
    del trained[left_out]
    found = judged(folder, folder, trained=trained)
    assert found.verdict == "FAIL"
    assert found.reason.endswith(f"nobody has signed {left_out}")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def zeros(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(tensor)
        for path in shards(folder)
        for name, tensor in load_file(path).items()
    }


def test_a_useless_list_of_the_last_site_does_no_harm(published: Path, folder: Path) -> None:
    useless = Store(str(folder.parent / "store")).put(b"[]")
    for more in (["00" * 32], [useless], ["00" * 32, useless]):
        assert judged(published, folder, more=more).verdict == "PASS"


def zeros_as(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(zeros(folder), folder / name, metadata={"format": "pt"})

    return change


def another_s(folder: Path) -> str:
    """A tensor of the first shard, once more in the last, for which the index names others."""
    first, last = shards(folder)[0], shards(folder)[-1]
    name = next(iter(load_file(first)))
    save_file({**load_file(last), name: zeros(folder)[name]}, last, metadata={"format": "pt"})
    return name


def from_pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_what_was_published_passes(published: Path, folder: Path) -> None:
    found = judged(published, folder)
    assert found.verdict == "PASS", found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (zeros_as("model.safetensors"), "model.safetensors"),
        (zeros_as("shard-00000-model-00001-of-00001.safetensors"), "shard-00000-model"),
        (zeros_as(".hidden.safetensors"), ".hidden.safetensors"),
        (zeros_as("model.fp16.safetensors"), "model.fp16.safetensors"),
        (zeros_as("adapter_model.safetensors"), "adapter_model.safetensors"),
        (zeros_as("model-00099-of-00099.safetensors"), "model-00099-of-00099.safetensors"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin"),
        (lambda f: (f / "more").mkdir(), "more"),
    ],
)
def test_weights_beside_those_that_were_published_fail(
    published: Path, folder: Path, change: Callable[[Path], object], named: str
) -> None:
    change(folder)
    found = judged(published, folder)
    assert found.verdict == "FAIL", found
    assert named in found.reason


def test_a_tensor_that_the_index_does_not_name_fails(published: Path, folder: Path) -> None:
    name = another_s(folder)
    found = judged(published, folder)
    assert (found.verdict, name in found.reason) == ("FAIL", True), found
    assert shards(folder)[-1].name in found.reason


def test_transformers_loads_what_was_not_published(folder: Path) -> None:
    """Why that matters: one file comes before an index, and a shard's tensors are all loaded."""
    name = another_s(folder)
    loaded = from_pretrained(folder).state_dict()
    assert loaded[NORM].any()
    assert not loaded[name].any()
    zeros_as("model.safetensors")(folder)
    assert not from_pretrained(folder).state_dict()[NORM].any()


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "tf_model.h5",
        "flax_model.msgpack", "adapter_config.json", "adapter_model.bin", "model.gguf",
        "model.safetensors.index.fp16.json",
    ],
)  # fmt: skip
def test_a_publisher_may_not_sign_other_weights(published: Path, folder: Path, name: str) -> None:
    """The site that publishes signs what lies there; that does not make it the run's model."""
    (folder / name).write_text("{}")
    found = judged(published, folder, folder)
    assert found.verdict == "FAIL", found
    assert name in found.reason


def test_sites_that_have_published_different_files_are_named(published: Path, folder: Path) -> None:
    """Neither the first nor the last to sign decides which tokenizer is the run's."""
    assert judged(published, folder, published, published).verdict == "PASS"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    for signed in ((published, folder), (folder, published)):
        found = judged(published, folder, *signed)
        assert found.verdict == "FAIL", found
        assert found.reason.endswith("a and b have signed different config.json")


def test_a_publisher_may_not_point_elsewhere(published: Path, folder: Path) -> None:
    """Nor at other weights in config.json, nor from its index at what is no safetensors file."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "x"}))
    found = judged(published, folder, folder)
    assert (found.verdict, "transformers_weights" in found.reason) == ("FAIL", True), found
    (folder / "config.json").write_text(json.dumps(config))
    assert judged(published, folder, folder).verdict == "PASS"
    last = shards(folder)[-1]
    last.rename(folder / "weights.dat")
    text = (folder / INDEX).read_text().replace(last.name, "weights.dat")
    (folder / INDEX).write_text(text)
    found = judged(published, folder, folder)
    assert (found.verdict, "weights.dat" in found.reason) == ("FAIL", True), found


def test_an_index_that_names_what_is_not_there(published: Path, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.more.weight"] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(index))
    found = judged(published, folder, folder)
    assert (found.verdict, "model.more.weight" in found.reason) == ("FAIL", True), found


def test_tensors_that_the_model_has_no_use_for(published: Path, folder: Path) -> None:
    """A name that is none of the model's may be another name for one of them."""
    index, path = json.loads((folder / INDEX).read_text()), shards(folder)[0]
    index["weight_map"]["more.weight"] = path.name
    (folder / INDEX).write_text(json.dumps(index))
    save_file({**load_file(path), "more.weight": torch.zeros(1)}, path, metadata={"format": "pt"})
    found = judged(published, folder, folder)
    assert (found.verdict, "more.weight" in found.reason) == ("FAIL", True), found


def test_a_folder_behind_a_url_is_seen(folder: Path) -> None:
    run = folder.parent
    (run / "record").mkdir()
    for name in LOG_FILES:
        (run / name).write_text("x")
    (folder / "more").mkdir()
    with fetched(run.as_uri()) as found:
        assert {each.name for each in (found / "model").iterdir()} == {
            each.name for each in folder.iterdir()
        }
        assert (found / "model" / "more").is_dir()
