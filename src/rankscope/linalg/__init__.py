"""Linear algebra of context maps: decompositions, rank measures, the map itself. Knows nothing of models."""
