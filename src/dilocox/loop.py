"""A site of a run around a training loop of your own: `dilocox.site`."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.errors import ConfigError, DataError, TrainingError
from dilocox.inner.fsdp import drop_gathered, whole
from dilocox.inner.loop_optimizers import Stateful
from dilocox.training.launch.own_site import Outcome, OwnSite
from dilocox.training.launch.several_processes import FollowingSite, join_together
from dilocox.training.loop.batches import NO_TEXT
from dilocox.training.loop.model import Evaluation, trained_tensors
from dilocox.training.loop.parts import OwnLoop
from dilocox.training.loop.progress_lines import ProgressLines
from dilocox.training.loop.ranks import several_processes
from dilocox.training.loop.turns import StepWork

B = TypeVar("B")


class Site:
    """A site of a run, as a context manager around a training loop. Made by `dilocox.site`.

    Entering the context joins the run, and writes the run's weights into the model. Within the
    context, the run changes the model's tensors in place during `step`, and only then. Leaving the
    context before the run has ended makes the site leave the run.
    """

    def __init__(self, own: OwnSite | FollowingSite) -> None:
        """Use `dilocox.site` instead."""
        self._own = own
        self._work: StepWork | None = None
        self._steps_taken: dict[int, int] = {}
        self._entered = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._stepping = threading.Lock()
        """Held by the thread that is in `step`."""

    def __enter__(self) -> Site:
        """Join the run. Returns when the first inner step is due, or the run has ended.

        Raises `DilocoxError` if the site is refused.
        """
        if self._entered:
            raise TrainingError(f"{self._me}: was entered before; call dilocox.site again")
        self._entered = True
        try:
            self._own.start()
        except BaseException as error:
            self._end(error)
            raise
        self._take()
        for optimizer in self._own.loop.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._count_step))
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: types.TracebackType | None,
    ) -> None:
        """Leave the run if it goes on, and wait until the site's part has ended."""
        self._end(error)
        why = None if error is None else self._own.explanation(error)
        if why is not None:
            raise why from error

    def _end(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._work = None
        if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
            self._own.end("its loop ended before the run", failed=False)
        else:
            text = str(error).partition("\n")[0]
            self._own.end(f"its loop ended by {type(error).__name__}: {text}", failed=True)

    @property
    def _me(self) -> str:
        return f"site {self._own.name}"

    @property
    def name(self) -> str:
        """Name of the site."""
        return self._own.name

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self._own.config

    @property
    def outcome(self) -> Outcome:
        """How the site's part has ended; `running` until then.

        `finished`: the run is complete, and the model holds its weights. `stopped`: the run was
        stopped and can be resumed. `left`: this site was asked to leave. `failed`: by an error.
        """
        return self._own.outcome

    @property
    def running(self) -> bool:
        """Whether an inner step is due."""
        return self._work is not None

    @property
    def inner_step(self) -> int:
        """Number of the inner step that is due, counted from 0 over the whole run.

        Raises `TrainingError` after the end.
        """
        return self._due().step

    @property
    def learning_rate(self) -> float:
        """Learning rate of `inner.schedule` for the inner step that is due.

        The loop may use it or not. Raises `TrainingError` after the end.
        """
        return self._due().learning_rate

    @property
    def round(self) -> int:
        """Number of the round, from 0."""
        return self._own.round

    def step(
        self,
        *,
        loss: Tensor | float,
        tokens: int | None = None,
        grad_norm: Tensor | float | None = None,
    ) -> bool:
        """Report one inner step. Call this after each optimizer step, at the loop's end.

        At the ends of the run's slots, this call exchanges with other sites: the model's tensors
        and, at a restart, the optimizer's state may change in place.

        Args:
            loss: mean loss of the step. The host does not wait for a tensor of a GPU.
            tokens: tokens of the step, in this process. None: as many as the run file's batch has.
            grad_norm: norm of the gradient, for the metrics. It may be infinite in a step that a
                gradient scaler leaves out. If FSDP2 divides the model, all processes give it.

        Returns:
            Whether another inner step is due. False: the run has ended, and so must the loop.

        Raises:
            TrainingError: the run has ended already, or the model has other tensors than before.
            DilocoxError: the run or this site has failed.
        """
        if not self._stepping.acquire(blocking=False):
            raise TrainingError(
                f"{self._me}: site.step was called while another call of it runs; call it from one "
                "thread, and not from an evaluation"
            )
        try:
            work = self._due()
            loss = _scalar("loss", loss)
            if grad_norm is not None:
                grad_norm = _scalar("grad_norm", grad_norm)
            if work.last:
                self._own.check_model()
            self._steps_taken.clear()
            self._own.done(loss, grad_norm, tokens)
            self._work = None
            self._take()
        finally:
            self._stepping.release()
        return self._work is not None

    def _take(self) -> None:
        """Wait for the next step. After an error the loop may go on, but its part has ended."""
        try:
            self._work = self._own.take()
        except BaseException as error:
            self._end(error)
            raise

    def batches(self, loader: Iterable[B] | None = None) -> Iterator[Any]:
        """Yield batches until the run ends.

        Args:
            loader: the loop's own data. It is begun again when it is exhausted; a sampler's
                `set_epoch` is called before. None gives the run's own data, each batch the site's
                exact part of the inner step that is due.

        Yields:
            What the loader yields; or (inputs, labels), int64 [b, L] each on the model's device.
            Labels are the next tokens; -100 does not count.

        Raises:
            ConfigError: the run has no text of its own (`data.own`), and there is no loader.
            TrainingError: `step` was not called since the last batch of the run's own data.
            DataError: the loader yields nothing.
        """
        if loader is not None:
            yield from self._of_loader(loader)
            return
        if self.config.data.own:
            raise ConfigError(NO_TEXT)
        if self.config.data.rows.packing == "documents":
            raise ConfigError(
                'data.packing "documents": site.batches() gives tokens and labels alone; set it '
                'to "stream" or "none", or pass a loader of your own'
            )
        self._own.check_batches()
        while self._work is not None:
            work = self._work
            assert self._own.batches is not None
            batch = self._own.batches.read_now()
            device = self._own.device
            yield (
                batch.inputs.to(device, non_blocking=True),
                batch.labels.to(device, non_blocking=True),
            )
            if self._work is work:
                raise TrainingError(
                    f"{self._me}: site.step was not called since the last batch; call it once "
                    "after each optimizer.step()"
                )

    def _of_loader(self, loader: Iterable[B]) -> Iterator[B]:
        self.uses_own_data()
        epoch = 0
        while self._work is not None:
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            found = False
            for batch in loader:
                found = True
                yield batch
                if self._work is None:
                    return
            if not found:
                raise DataError(
                    "site.batches: the loader has no more batches, and the run goes on; pass an "
                    "object that can be read again, such as a DataLoader"
                )
            epoch += 1

    def uses_own_data(self) -> None:
        """Note that the loop reads data of its own. `batches` with a loader calls this by itself.

        The metrics then count no labels of the run's own data.
        """
        if self._own.batches is not None:
            self._own.batches.own_loader = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the shared model, which all sites hold in the same bits, as the model's state.

        The trained tensors are copies of the run's anchor, on the CPU. All other entries are the
        model's own. Call this within the context, between two steps, or after the run's end.
        """
        shared = self._own.shared_tensors()
        model = self._own.loop.model
        names = {id(p): name for name, p in trained_tensors(model).items()}
        kept = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
        state: dict[str, Tensor] = {}
        for name, tensor in model.state_dict().items():
            known = names.get(kept.get(name, 0))
            state[name] = tensor if known is None else shared[known].detach().cpu().clone()
        return state

    def touch(self) -> None:
        """Say that the loop is at work, in long work between two steps such as an evaluation.

        A loop that reports nothing for the time `stall` of the run's time limits is given up.
        """
        self._own.touch()

    def leave(self) -> None:
        """Ask the run to let this site go. Steps go on until the rounds planned are done."""
        self._own.retire()

    def _due(self) -> StepWork:
        if self._work is None:
            when = "has ended" if self._entered else "has not begun: enter the context (with)"
            raise TrainingError(
                f"{self._me}: no inner step is due, since its part in the run {when} "
                f"({self.outcome}); end the loop when site.step returns False"
            )
        return self._work

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Refuse a second step of an optimizer that no `step` has reported."""
        if self._work is None:
            return
        taken = self._steps_taken.get(id(optimizer), 0)
        if taken:
            raise TrainingError(
                f"{self._me}: the optimizer steps again, and site.step was not called since its "
                "last step; call site.step once after each optimizer.step()"
            )
        self._steps_taken[id(optimizer)] = taken + 1


class HasSite(Protocol):
    """A trainer's callback that keeps its site."""

    site: Site | None


def enter(callback: HasSite, joined: Site) -> None:
    """Enter `joined` as the site of a trainer's callback, whose data are the trainer's own.

    The callback has the site before it joins: entering may evaluate the model with the trainer, and
    the callback then says that the site is alive. It has none if the site cannot join. Raises
    `DilocoxError` like `Site.__enter__`.
    """
    callback.site = joined
    try:
        joined.__enter__()
    except BaseException:
        callback.site = None
        raise
    joined.uses_own_data()


def _scalar(what: str, value: Tensor | float) -> Tensor | float:
    """Return a figure of a step as a number or as a plain tensor of one element.

    With FSDP2, `clip_grad_norm_` returns a norm that is divided among the processes. Then the call
    is collective. Raises `TrainingError` that names `what` if the figure is no scalar.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise TrainingError(
            f"site.step: {what} has the shape {tuple(value.shape)}; give a scalar, the mean of the "
            "step"
        )
    return whole(value)


def own_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    evaluation: Evaluation | None,
    state: Mapping[str, Stateful] | None,
) -> OwnLoop:
    """Return the parts of a loop, as `dilocox.site` takes them."""
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    # A gathered module of FSDP2 hides its own part of the tensors.
    drop_gathered(whole)
    return OwnLoop(whole, given, evaluation, state or {})


def site_of(
    config: RunConfig,
    name: str,
    loop: OwnLoop,
    endpoint: Callable[[], Endpoint],
    quiet: bool,
) -> Site:
    """Return the site `name`, checked and not yet entered. See `dilocox.site`.

    `endpoint`: returns the coordinator's address and the token; only the site's first process
    calls it.
    """
    show = ProgressLines(quiet)
    if several_processes():
        return Site(join_together(config, name, loop, endpoint, show))
    return Site(OwnSite(config, name, endpoint(), loop, show))
