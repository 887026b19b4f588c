"""The load-balancing loss of a mixture of experts, as its model type in transformers computes it.

The loss keeps routers from sending most tokens to few experts (Switch Transformer, arXiv
2101.03961, equations 4 to 6). It depends on the routers of all layers together, so one chunk has
to hold the whole model.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dilocox.errors import ModelError
from dilocox.models.meta_model import Layout, build_skeleton
from dilocox.models.module_copies import Given, replaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FACTOR = "router_aux_loss_coef"


def asks_for_router_loss(config: Any) -> bool:
    """Return whether a model's configuration asks for the load-balancing loss."""
    return bool(getattr(config, "output_router_logits", False))


def router_loss_factor(lm: nn.Module) -> float:
    """Return the factor of the load-balancing loss of a causal LM.

    The factor is 0 if the configuration does not ask for the loss, or if the type has none.
    """
    return float(getattr(lm, _FACTOR, 0.0)) if asks_for_router_loss(lm.config) else 0.0


def probe_router_loss(config: PretrainedConfig) -> None:
    """Raise `ModelError` if `config` asks for a load-balancing loss that its type does not have."""
    if asks_for_router_loss(config) and not hasattr(build_skeleton(config), _FACTOR):
        raise ModelError(
            f'output_router_logits = true: type "{config.model_type}" has no load-balancing loss '
            "in transformers; set output_router_logits = false"
        )


def router_loss(lm: nn.Module, layout: Layout, output: Any) -> Tensor:
    """Return the load-balancing loss of a batch, without its factor, an fp32 scalar.

    The causal LM's own forward computes the loss, with a body that returns `output` and no head.

    Args:
        lm: a causal LM with all layers.
        layout: where its body and its head are.
        output: what the body has returned, with `router_logits` of each layer.
    """
    given = copy.copy(output)
    given.last_hidden_state = given.last_hidden_state[:, :1].detach()
    bare = replaced(replaced(lm, layout.body, Given(given)), layout.head, nn.Identity())
    found = bare(
        inputs_embeds=given.last_hidden_state, use_cache=False, output_router_logits=True
    ).aux_loss
    return found.float()  # type: ignore[no-any-return]
