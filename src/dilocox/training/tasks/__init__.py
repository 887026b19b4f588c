"""Evaluation of a model on tasks of lm-eval, EleutherAI's Language Model Evaluation Harness."""
