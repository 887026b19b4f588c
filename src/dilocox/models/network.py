"""Loads a whole network with transformers, from a Hugging Face folder or a PEFT folder.

The folder may come from a stranger, so no code in it is run and no pickle is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.models.adapter_folder import AdapterFolder

if TYPE_CHECKING:
    import torch


def load_network(
    folder: Path, adapters: AdapterFolder | None, dtype: torch.dtype | None = None
) -> Any:
    """Return the network in `folder`, on the CPU.

    `adapters`: the folder's adapters, which are added to their base model; None if the folder holds
    a whole model. `dtype`: of the weights; None: their own. Passes on the errors of transformers
    and PEFT, which are of many kinds.
    """
    from transformers import AutoModelForCausalLM

    base, revision = (str(folder), None) if adapters is None else adapters.base
    network = AutoModelForCausalLM.from_pretrained(
        base,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation=attention_of(base, revision),
        **({} if revision is None else {"revision": revision}),
        **({} if dtype is None else {"dtype": dtype}),
    )
    return network if adapters is None else adapters.added_to(network)


def attention_of(base: str, revision: str | None) -> str:
    """Return the implementation of attention that computes the network of a folder or hub name.

    A folder may name one whose code is on a hub, so it is chosen here. Passes on transformers'
    errors.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    named = {} if revision is None else {"revision": revision}
    config = AutoConfig.from_pretrained(base, trust_remote_code=False, **named)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # Beside models that cap the logits of attention, there are some with attention sinks.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    supported = getattr(kind, "_supports_sdpa", True)
    return "eager" if capped or not supported else "sdpa"
