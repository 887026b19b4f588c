"""A loop whose model and data the run does not know: a classifier of numbers, no language model.

Arguments: run file, site, overrides. A line says which running means the model has when its site
has joined, and one which it has at the end. The last line says how the site's part has ended.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dilocox


def points(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Points float32 [count, 8], and whether the first four coordinates' sum is above zero."""
    rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return rows, (rows[:, :4].sum(1) > 0).long()


def held_out_loss(model: nn.Module) -> Tensor:
    """Loss of held-out points, which are the same at all sites."""
    rows, classes = points(99, 256)
    assert not model.training
    return F.cross_entropy(model(rows), classes)


def running_means(model: nn.Module) -> str:
    """The running means of the model, exactly."""
    return " ".join(float(each).hex() for each in model.get_buffer("1.running_mean"))


def main() -> int:
    """Train as one site. Only paris has held-out data."""
    file, name, *sets = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    config = dilocox.load_run(file, sets)
    evaluation = held_out_loss if name == "paris" else None
    with dilocox.site(
        config, name=name, model=model, optimizer=optimizer, evaluation=evaluation
    ) as site:
        print("begins with", running_means(model))
        rows, classes = points(len(name), 512)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(rows, classes), batch_size=16, shuffle=True
        )
        for inputs, labels in site.batches(loader):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            site.step(loss=loss, tokens=len(labels))
    print("ends with", running_means(model))
    print(site.outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
