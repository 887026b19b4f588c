"""The claim `start`: theta_0 is what the run file says, whoever has signed it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dilocox.config.adapter import AdapterSection
from dilocox.config.handover import MOMENTUM
from dilocox.config.run_config import ModelSection
from dilocox.errors import RecordError
from dilocox.models import load_model_config
from dilocox.models import weight_source as weights
from dilocox.models.adapter import adapter_shapes
from dilocox.models.meta_model import build_skeleton
from dilocox.models.weight_source import FreshWeights, fresh_facts
from dilocox.record.log.blob_store import Store
from dilocox.record.log.digests import stage_root, tensor_digest
from dilocox.record.log.state_statements import State
from dilocox.record.verify import start_weights as judging
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.verify.start_weights import Start
from dilocox.record.writer.rank_recorder import MOMENTUM_OF, listing_of
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from tests.support.architectures import reference_model, small_config

SEED = 7
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "tie_word_embeddings": True, "max_position_embeddings": 32,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
MANIFEST = {"start_class": True, "versions": {"torch": fresh_facts()["torch"]}}


def fresh(architecture: Mapping[str, Any] = ARCHITECTURE, vocabulary: int = 40) -> Tensors:
    """Theta_0 of `SEED`, as a site's ranks make it."""
    config = load_model_config(ModelSection(architecture=dict(architecture)), vocabulary)
    source = FreshWeights(config, SEED)
    return {name: source.tensor(name) for name, _ in build_skeleton(config).named_parameters()}


def judged(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    model: Mapping[str, Any] | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] = MANIFEST,
    start: Path | None = None,
    kept: bool = True,
    stages: int = 1,
    outer: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    adapters: Path | None = None,
) -> str:
    """What is said of a run whose founder has signed `tensors`, in so many stages, as theta_0."""
    store = Store(str(folder / "store"))
    names = list(tensors)
    size = -(-len(names) // stages)
    course = RunHistory("run", "", {
        **manifest,
        "config": {
            "site": {"stages": stages, "shards": 1},
            "run": {"seed": SEED},
            "model": {"architecture": ARCHITECTURE, **(model or {})},
            "outer": outer or {},
            **({} if adapter is None else {"adapter": dict(adapter)}),
        },
    })  # fmt: skip
    for stage in range(stages):
        digests = []
        for name in names[stage * size : (stage + 1) * size]:
            digests.append(tensor_digest(name, tensors[name]))
            if kept:
                store.put(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        root, listing = stage_root(digests).hex(), store.put(listing_of(digests))
        said = fresh_facts() if facts is None else facts
        course.states.append(State("initial", "alice", stage, root, listing, {}, 0, facts=said))

    def listing_(state: State) -> Any:
        from dilocox.record.verify.replay import read_listing

        return read_listing(store.get, state.listing, state.root)

    return Start(course, listing_, store.get, start, adapters, lambda *_: None).judge()


def backdoored(tensors: Tensors) -> Tensors:
    return {name: tensor * 1.5 + 0.01 for name, tensor in tensors.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_theta_0_is_made_again_from_the_seed(tmp_path: Path, stages: int) -> None:
    made = fresh()
    assert judged(tmp_path, made, stages=stages) == (
        f"{len(made)} tensors, the same bits as run.seed = 7 gives"
    )


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"instructions": "NO AVX"},
        {"machine": "aarch64"},
        {"torch": "1.0"},
        {"class": "left out"},
    ],
)
def test_another_theta_0_fails_whatever_class_it_claims(
    tmp_path: Path, facts: Mapping[str, Any]
) -> None:
    said = {} if "class" in facts else {**fresh_facts(), **facts}
    with pytest.raises(RecordError, match=r"model\.embed_tokens\.weight of theta_0, which alice"):
        judged(tmp_path, backdoored(fresh()), facts=said)


def one_bit(tensors: Tensors) -> Tensors:
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model.embed_tokens.weight"].view(torch.int32)[0, 0] ^= 1
    return changed


def test_a_single_bit_counts_within_a_class_alone(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"is not what run\.seed = 7 gives"):
        judged(tmp_path, one_bit(fresh()))
    elsewhere = {**fresh_facts(), "instructions": "NO AVX"}
    with pytest.raises(NotRunError, match=r"by \d.*e-.* of its size; it was made on .* NO AVX"):
        judged(tmp_path, one_bit(fresh()), facts=elsewhere)


def test_other_versions_are_named(tmp_path: Path) -> None:
    other = {**fresh_facts(), "transformers": "5.0.0"}
    with pytest.raises(NotRunError, match=r"it was made by transformers 5\.0\.0: verify with"):
        judged(tmp_path, backdoored(fresh()), facts=other)


def test_what_is_in_no_store_is_judged_within_a_class(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not what"):
        judged(tmp_path, backdoored(fresh()), kept=False)
    elsewhere = {**fresh_facts(), "instructions": "NO AVX"}
    with pytest.raises(NotRunError, match="verify on such a machine"):
        judged(tmp_path, one_bit(fresh()), kept=False, facts=elsewhere)


def test_older_records_do_not_say_what_made_theta_0(tmp_path: Path) -> None:
    old = {"versions": MANIFEST["versions"]}
    assert "the same bits" in judged(tmp_path, fresh(), facts={}, manifest=old)
    with pytest.raises(NotRunError, match="does not say what made it"):
        judged(tmp_path, backdoored(fresh()), facts={}, manifest=old)


def without(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if name != "model.norm.weight"}


def more(tensors: Tensors) -> Tensors:
    return {**tensors, "model.extra.weight": torch.zeros(3)}


def reshaped(tensors: Tensors) -> Tensors:
    return {**tensors, "model.norm.weight": torch.ones(4, 4)}


def moving(tensors: Tensors) -> Tensors:
    return {**tensors, **{MOMENTUM_OF + n: torch.ones_like(t) for n, t in tensors.items()}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without, r"theta_0 has no model\.norm\.weight"),
        (more, r"model\.extra\.weight of theta_0 is float32 \(3,\); the model has no such tensor"),
        (reshaped, r"model\.norm\.weight of theta_0 is float32 \(4, 4\); the model has \(16,\)"),
        (moving, r"an outer momentum, and the run file names no handover"),
    ],
)
def test_other_tensors_than_the_model_has(
    tmp_path: Path, change: Callable[[Tensors], Tensors], said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        judged(tmp_path, change(fresh()))


def test_a_stranger_s_model_of_a_billion_layers_is_not_built(tmp_path: Path) -> None:
    large = {**ARCHITECTURE, "num_hidden_layers": 10**9}
    with pytest.raises(RecordError, match="and the model 1000000000 layers"):
        judged(tmp_path, fresh(), {"architecture": large})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "model"
    reference_model(small_config("llama"), seed=4).save_pretrained(folder)  # type: ignore[operator]
    return folder


def stored(folder: Path) -> Tensors:
    model = reference_model(small_config("llama"), seed=4)
    return {name: each.detach().float() for name, each in model.named_parameters()}


def of_path(path: Any, **more: Any) -> dict[str, Any]:
    return {"architecture": None, "path": str(path), "pretrained": True, **more}


def test_theta_0_of_a_model_is_compared_with_its_files(tmp_path: Path, published: Path) -> None:
    theta = stored(published)
    for start in (None, published):
        said = judged(tmp_path, theta, of_path(published), start=start)
        assert said == f"{len(theta)} tensors, the same bits as {published} holds"
    with pytest.raises(RecordError, match=rf"which alice signed, is not what {published} holds"):
        judged(tmp_path, backdoored(theta), of_path("hub/name"), start=published)
    # What lies here under that name may be something else than what the run began from.
    with pytest.raises(NotRunError, match="name their folder with --start"):
        judged(tmp_path, backdoored(theta), of_path(published))


def test_a_folder_that_a_stranger_names_is_plain_files(tmp_path: Path, published: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(NotRunError, match=r"config\.json: not a file"):
        judged(tmp_path, stored(published), of_path(folder))


@pytest.mark.parametrize("revision", [None, "main", "0123456789" * 4])
def test_a_model_of_the_hub_is_taken_from_this_machine_alone(
    tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    model = of_path("hub/name", revision=revision)
    with pytest.raises(NotRunError, match=r"hub/name.*not on this machine.*--start"):
        judged(tmp_path, stored(published), model)
    monkeypatch.setattr(judging, "_cached", lambda path, revision: published)
    assert "the same bits" in judged(tmp_path, stored(published), model)
    # A branch may have moved since; a commit has not.
    pinned = revision is not None and len(revision) == 40
    with pytest.raises(RecordError if pinned else NotRunError, match="is not what"):
        judged(tmp_path, backdoored(stored(published)), model)


def test_a_configuration_alone_gives_weights_of_the_seed(tmp_path: Path, published: Path) -> None:
    model = of_path(published, pretrained=False)
    config = load_model_config(ModelSection(path=str(published), pretrained=False), None)
    source = FreshWeights(config, SEED)
    theta = {name: source.tensor(name) for name in stored(published)}
    assert "as run.seed = 7 gives" in judged(tmp_path, theta, model)
    with pytest.raises(RecordError, match=r"is not what run\.seed = 7 gives"):
        judged(tmp_path, stored(published), model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_handover_brings_its_momentum(tmp_path: Path, published: Path, dtype: str) -> None:
    folder = tmp_path / "start"
    folder.mkdir()
    for file in published.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    theta = stored(published)
    momenta = {name: torch.randn_like(each) for name, each in theta.items()}
    save_file(momenta, folder / MOMENTUM)
    held = {n: t.bfloat16().float() if dtype == "bf16" else t for n, t in momenta.items()}
    signed = theta | {MOMENTUM_OF + name: each for name, each in held.items()}
    more = {"start": folder, "outer": {"momentum_dtype": dtype}}
    model = of_path("start", handover=True)
    assert f"{2 * len(theta)} tensors" in judged(tmp_path, signed, model, **more)  # type: ignore[arg-type]
    last = MOMENTUM_OF + next(iter(theta))
    with pytest.raises(RecordError, match=rf"{last} of theta_0"):
        judged(tmp_path, {**signed, last: signed[last] + 1}, model, **more)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"has no outer momentum, and the run file names a"):
        judged(tmp_path, theta, model, **more)  # type: ignore[arg-type]


def test_adapters_that_were_handed_over(tmp_path: Path, published: Path) -> None:
    """They are compared with the folder that is named, or with one of the run file's name."""
    config = load_model_config(ModelSection(path=str(published)), None)
    shapes = adapter_shapes(config, AdapterSection(rank=2))
    theta = {name: torch.randn(shape) for name, shape in shapes.items()}
    momenta = {name: torch.randn(shape) for name, shape in shapes.items()}
    folder = tmp_path / "start"
    folder.mkdir()
    save_file(theta, folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 32}')
    save_file(momenta, folder / MOMENTUM)
    signed = theta | {MOMENTUM_OF + name: each for name, each in momenta.items()}
    section = {"rank": 2, "handover": str(folder)}
    more: dict[str, Any] = {"adapter": section, "start": published}
    model = of_path("base")
    said = f"{2 * len(theta)} tensors, the same bits as {folder} holds"
    assert judged(tmp_path, signed, model, **more) == said
    assert judged(tmp_path, signed, model, adapters=folder, **more) == said
    name = next(iter(theta))
    for other in (name, MOMENTUM_OF + name):
        foreign = {**signed, other: signed[other] + 1}
        with pytest.raises(RecordError, match=f"{other} of theta_0"):
            judged(tmp_path, foreign, model, adapters=folder, **more)
        with pytest.raises(NotRunError, match="name their folder with --adapters"):
            judged(tmp_path, foreign, model, **more)
    with pytest.raises(RecordError, match="has no outer momentum"):
        judged(tmp_path, theta, model, **more)
    # Adapters that a run starts from have no outer momentum.
    begun: dict[str, Any] = {"adapter": {"rank": 2, "path": str(folder)}, "start": published}
    assert judged(tmp_path, theta, model, **begun).startswith(f"{len(theta)} tensors, the same")
    with pytest.raises(RecordError, match="the run file names no handover"):
        judged(tmp_path, signed, model, **begun)
    changed = {**theta, name: theta[name] + 1}
    with pytest.raises(RecordError, match=f"{name} of theta_0"):
        judged(tmp_path, changed, model, adapters=folder, **begun)
    with pytest.raises(RecordError, match="freezes others"):
        judged(tmp_path, theta, model, adapter=begun["adapter"] | {"freeze_a": True},
               start=published)  # fmt: skip
    # The same values, computed otherwise; and values of another shape.
    (folder / ADAPTER_CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 8}')
    with pytest.raises(NotRunError, match=r"adapter\.alpha: 32\.0, .* have 8; .*--adapters"):
        judged(tmp_path, theta, model, **begun)
    with pytest.raises(RecordError, match=r"adapter\.alpha"):
        judged(tmp_path, theta, model, adapters=folder, **begun)
    (folder / ADAPTER_CONFIG).write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 32}')
    save_file({**theta, name: theta[name][:1]}, folder / ADAPTER_FILE)
    with pytest.raises(NotRunError, match=r"and this run's has .*--adapters"):
        judged(tmp_path, theta, model, **begun)
    with pytest.raises(RecordError, match="and this run's has"):
        judged(tmp_path, theta, model, adapters=folder, **begun)
    save_file(theta, folder / ADAPTER_FILE)
    for change, what in (({"rank": 3}, r"has shape \(2, "), ({"handover": None}, "no handover")):
        with pytest.raises(RecordError, match=what):
            judged(tmp_path, signed, model, adapter=section | change, start=published)
    folder.rename(tmp_path / "gone")
    with pytest.raises(NotRunError, match="name its folder with --adapters"):
        judged(tmp_path, signed, model, **more)
    with pytest.raises(NotRunError, match=r"began from adapter\.path = .*with --adapters"):
        judged(tmp_path, theta, model, **begun)


def test_a_run_that_has_not_begun_has_no_theta_0(tmp_path: Path) -> None:
    course = RunHistory("run", "", {"config": {"site": {"stages": 1, "shards": 1}}})
    start = Start(course, lambda state: [], lambda digest: b"", None, None, lambda *_: None)
    with pytest.raises(NotRunError, match="the run has not begun"):
        start.judge()


def test_the_version_of_fresh_weights_stands_for_their_bits() -> None:
    """Whoever changes how a seed becomes weights has to raise `FRESH_WEIGHTS`: sums in bits that
    all processors share."""
    total = sum(float(tensor.double().abs().sum()) for tensor in fresh().values())
    assert (weights.FRESH_WEIGHTS, round(total, 2)) == (1, 196.36)
