"""Attention mechanisms behind one signature, and the one place that touches transformers' attention interface."""
