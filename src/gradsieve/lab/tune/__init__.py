"""`gradsieve tune`: measures the ranks' connections, and predicts the time per training step of every method.

1. `physical` measures latency, bandwidth, memory and selection.
2. `exchanges` and `training` time short exchanges and whole training steps, on the ranks' own connections.
3. `fit` turns the times into a few constants per method. `predict` adds them up for a model.
4. `calibrate` times the best candidates themselves. `recommend` chooses one. `check` runs the best for real.
"""
