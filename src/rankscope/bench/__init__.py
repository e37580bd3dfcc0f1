"""Time, memory and error of attention mechanisms on this machine, and what a cost model says they should be."""
