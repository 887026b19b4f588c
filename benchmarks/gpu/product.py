"""Every call of the acceptance run into dilocox that is not its command line or public API.

A change of the product touches this module alone. Imports stand inside functions: a part imports
the packages that it needs, and PyTorch reads some settings only once.
"""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.sizes import Shape


class Site:
    """One rank that holds the whole model of a site, built as a run builds it."""

    def __init__(self, rank: Any, inputs: Tensor, labels: Tensor, compute: float) -> None:
        self._rank = rank
        self.inputs = inputs
        self.labels = labels
        self.flops_per_token = 6.0 * compute
        """Operations of forward and backward pass, without recomputation."""

    def step(self, learning_rate: float = 1e-4) -> Any:
        """Train one inner step."""
        return self._rank.model.inner_step(self.inputs, self.labels, learning_rate)

    def compile_problem(self) -> str | None:
        """Return why layers run without being compiled, or None. Call it after the first step."""
        problem: str | None = self._rank.model.compile_problem()
        return problem

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Return mean loss and gradients of the batch, by full name. The model stays as it is."""
        model = self._rank.model
        names = list(model.local_tensors())
        loss, found = model.loss_and_gradients(self.inputs, self.labels, names)
        return loss, {name: each.detach().clone() for name, each in found.items()}


class _Drawn:
    """Initial weights drawn on the device. The product draws on one core, in seconds per 1e9
    values."""

    def __init__(self, shapes: Callable[[], dict[str, torch.Size]], device: torch.device) -> None:
        self._shapes = shapes
        self._device = device

    def tensor(self, full_name: str) -> Tensor:
        """See `dilocox.models.WeightSource`."""
        shape = self._shapes()[full_name]
        if len(shape) < 2:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device) * 0.02


def raw_run(shape: Shape, cuda: bool, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a run file with the product's defaults and one site."""
    raw: dict[str, Any] = {
        "model": {"architecture": shape.architecture},
        "data": {"sequence_length": shape.length},
        "site": {
            "batch_size": shape.rows,
            "micro_batch_size": shape.micro,
            "device": "cuda" if cuda else "cpu",
        },
        "sites": {"north": {}},
    }
    for section, keys in sections.items():
        raw[section] = {**raw.get(section, {}), **keys}
    return raw


def build_site(shape: Shape, cuda: bool, **sections: dict[str, Any]) -> Site:
    """Build a site's model as the product does, without outer state."""
    import dilocox
    from dilocox.models import build_chunk
    from dilocox.training import builder

    config = dilocox.resolve_run(raw_run(shape, cuda, **sections))
    blueprint = builder.ModelPlan.of(config, None)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shapes: dict[str, torch.Size] = {}

    def shapes_of() -> dict[str, torch.Size]:
        if not shapes:
            for spec in blueprint.cut:
                chunk = build_chunk(
                    blueprint.hf_config, spec, attention="sdpa", activation_checkpointing=False
                )
                state = chunk.state_dict()
                shapes.update({f: state[name].shape for name, f in chunk.full_names().items()})
        return shapes

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(builder.ModelPlan, "weights", lambda *_: _Drawn(shapes_of, device))
        )
        stack.enter_context(patch.object(builder, "build_states", lambda *_, **__: []))
        torch.manual_seed(7)
        rank = builder.build_rank(
            config, blueprint, builder.RankPlace("north", 0, 0), builder.Hooks(),
            builder.RankWiring(store=None, local_rank=0, ranks_here=1, timeout=600.0),
        )  # fmt: skip
    return Site(rank, *batch_of(shape), blueprint.cut[0].compute)


def sharded_gradients(shape: Shape, cuda: bool) -> list[Tensor]:
    """Return local gradients of one pass through a chunk sharded over a mesh of one rank, in bf16.

    The default process group of one rank must exist.
    """
    import dilocox
    from dilocox.inner import fsdp
    from dilocox.models import build_chunk, materialise
    from dilocox.training import builder

    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("pp", "dp"))
    config = dilocox.resolve_run(raw_run(shape, cuda))
    blueprint = builder.ModelPlan.of(config, None)
    chunk = build_chunk(
        blueprint.hf_config, blueprint.cut[0], attention="sdpa", activation_checkpointing=False
    )
    shapes = {full: chunk.state_dict()[name].shape for name, full in chunk.full_names().items()}
    fsdp.shard_chunk(chunk, mesh["dp"], torch.bfloat16, True)
    materialise(chunk, _Drawn(lambda: shapes, device), device)
    fsdp.finish_sharding(chunk)
    inputs, _ = batch_of(shape)
    logits: Tensor = chunk(inputs[: shape.micro].to(device))
    logits.float().square().mean().backward()
    fsdp.drop_gathered(chunk)
    parameters = list(chunk.parameters())
    found = [fsdp.local(p.grad) for p in parameters if p.grad is not None]
    if len(found) != len(parameters):
        raise RuntimeError(f"{len(parameters) - len(found)} parameters have no gradient")
    return found


def batch_of(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of one step, int64 [rows, length] each, drawn with a fixed seed."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, shape.vocabulary, (shape.rows, shape.length + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def hf_config_of(shape: Shape, cuda: bool) -> Any:
    """Return the model's Hugging Face configuration, as a run resolves it."""
    import dilocox
    from dilocox.models import load_model_config

    return load_model_config(dilocox.resolve_run(raw_run(shape, cuda)).model, None)


def parameters_of(shape: Shape, cuda: bool) -> int:
    """Return the number of parameters of the model; tied ones count once."""
    from dilocox.models import count_parameters

    return int(count_parameters(hf_config_of(shape, cuda)))


def compute_dtype(cuda: bool) -> torch.dtype:
    """Return the dtype that `site.precision = "auto"` has on the device."""
    from dilocox.config.run_config import resolve_run
    from dilocox.inner import resolve_precision

    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    run = resolve_run({"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"a": {}}})
    return resolve_precision(run.site, device)


def prepare(run_file: Path, shared: Path) -> None:
    """Make the token files of the run. Processes that run at the same time make them once."""
    import dilocox
    from dilocox.training.launch.data_preparation import prepare_data
    from dilocox.training.launch.forking import stay_forkable

    stay_forkable()
    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_data(dilocox.load_run(run_file))


@contextmanager
def slower_learning(site: str) -> Iterator[None]:
    """Make the ranks of `site` train with other rates than they sign, in runs of this context."""
    from dilocox.training.builder import build_rank as plain
    from dilocox.training.launch import rank as rank_process

    def build(*arguments: Any, **options: Any) -> Any:
        rank: Any = plain(*arguments, **options)
        if rank.place.site == site:
            step = rank.model.inner_step

            def inner_step(inputs: Any, labels: Any, rate: float, *more: Any) -> Any:
                return step(inputs, labels, 1.05 * rate, *more)

            rank.model.inner_step = inner_step
        return rank

    with patch.object(rank_process, "build_rank", build):
        yield


@contextmanager
def paced(bits_per_second: float) -> Iterator[None]:
    """Limit the rate of every connection between sites, in runs of this context.

    The kernel paces TCP by SO_MAX_PACING_RATE, so no `tc` and no namespace is needed.
    """
    from dilocox.training.launch import local
    from dilocox.training.launch import site as site_process
    from dilocox.transport.link import endpoint

    option = getattr(socket, "SO_MAX_PACING_RATE", 47)
    begin = endpoint.LinkEndpoint.__init__

    def pace(connection: socket.socket, _name: str) -> None:
        connection.setsockopt(socket.SOL_SOCKET, option, max(1000, int(bits_per_second / 8)))

    def paced_begin(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "congestion": "paced"})

    with ExitStack() as stack:
        stack.enter_context(patch.object(endpoint, "set_congestion", pace))
        stack.enter_context(patch.object(endpoint.LinkEndpoint, "__init__", paced_begin))
        for module in (local, site_process):
            if hasattr(module, "check_congestion"):
                stack.enter_context(patch.object(module, "check_congestion", lambda _name: None))
        yield


class _OnGpu:
    """A span that measures its time on the GPU, from its first operation to the end of its last.

    The host may be far ahead of the GPU.
    """

    def __init__(self, inner: Any, name: str, key: str, write: Callable[[str], None]) -> None:
        self._inner, self._about, self._write = inner, {"name": name, "key": key}, write

    def __enter__(self) -> Any:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()
        return self._inner.__enter__()

    def __exit__(self, *raised: object) -> Any:
        done = self._inner.__exit__(*raised)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        self._write(json.dumps({**self._about, "ms": self._begin.elapsed_time(end)}) + "\n")
        return done


@contextmanager
def gpu_time_of_spans(names: Sequence[str], file: Path) -> Iterator[None]:
    """Write the GPU's time in spans of exchanges to `file`, in runs of this context.

    The file has JSON lines of name, key and ms.
    """
    from dilocox.utils import tracing

    plain = tracing.span

    def write(line: str) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(line)

    def span(name: str, **arguments: Any) -> Any:
        inner = plain(name, **arguments)
        return _OnGpu(inner, name, arguments["key"], write) if name in names else inner

    with patch.object(tracing, "span", span):
        yield


@contextmanager
def ranks_share_gpu(cuda: bool) -> Iterator[None]:
    """Let the ranks of a site share GPU 0 by the staged process group, in runs of this context."""
    import torch.distributed as dist

    from benchmarks.gpu import staged
    from dilocox.training import builder
    from dilocox.training.launch import rank as rank_process

    def first_gpu(_site: Any, _local_rank: int = 0) -> torch.device:
        return torch.device("cuda", 0)

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(dist, "init_process_group", staged.register("cuda" if cuda else "cpu"))
        )
        for module in (builder, rank_process) if cuda else ():
            stack.enter_context(patch.object(module, "resolve_device", first_gpu))
        yield


def end_rank_after_error() -> None:
    """End this process as a rank ends after an error (`dilocox.training.launch.rank`)."""
    from dilocox.utils import processes

    processes.exit_now(1)
