"""Fine-tuning of a real pretrained model by every method, with adapters and without: `command`."""
