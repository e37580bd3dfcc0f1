"""The measurement: corpus and model to labelled spectra."""
