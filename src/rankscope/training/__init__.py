"""Pretraining and finetuning: the paper's experiments at any size, on ``transformers.Trainer``."""
