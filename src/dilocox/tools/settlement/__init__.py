"""Settlement of a run on an Ethereum-like chain: anchors, stakes, payments (docs/settlement.md).

Beside a run only: the training path never imports this package. It needs the extra `chain`.
"""
