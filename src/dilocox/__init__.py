"""dilocox: one model, trained on GPUs in several places."""
